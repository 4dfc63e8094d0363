"""What a program has of a plan's recipes and layouts, against searches of these alone."""

import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.planning import PlanRequest, advise, find_hardware, find_model, fitted_constants, make_plan, read_rows
from octavo.planning.jobs import DIVIDED_AS, TRAINED_WITH, Framework, Sharding
from octavo.planning.rows import training_job
from octavo.planning.search import best_layout

CONSTANTS = fitted_constants()
ROWS = Path(__file__).parents[3] / "benchmarks" / "planner_rows.csv"


@pytest.fixture(scope="module")
def made() -> Any:
    """Its fastest recipe is delayed under ZeRO-1, neither of which torchtitan has."""
    return make_plan(PlanRequest(model=find_model("llama-3-8b"), hardware=find_hardware("h100"), gpus=8), CONSTANTS)


@pytest.mark.parametrize("larger", [False, True])
def test_the_fastest_that_the_program_has_is_named_with_its_gain(made, larger):
    """Over BF16, both with FSDP, which BF16's fastest layout has for neither model."""
    if larger:
        request = PlanRequest(model=find_model("llama-3-70b"), hardware=find_hardware("h100"), gpus=64)
        made = make_plan(request, CONSTANTS)
    job = made.bf16.job
    assert job.layout.sharding == Sharding.ZERO1
    assert made.best_fp8.name not in TRAINED_WITH[Framework.TITAN]
    tried = list(dict.fromkeys(each.job.layout for each in best_layout(job, CONSTANTS)))[:24]
    own = [layout for layout in tried if layout.sharding == Sharding.FSDP]
    before = best_layout(job, CONSTANTS, own)[0]
    steps = {}
    for name in ("tensorwise", "rowwise"):
        precision = next(option.candidate.job.precision for option in made.options if option.name == name)
        steps[name] = best_layout(job.at(precision), CONSTANTS, own)[0]
    best = min(steps, key=lambda name: steps[name].seconds["total"])
    gain = before.seconds["total"] / steps[best].seconds["total"]
    factor = made.best_fp8.speedup[0] / made.best_fp8.speedup[1]
    words = f"The fastest that torchtitan has is {best} with {steps[best].job.layout}: {gain:.2f} times as fast as BF16"
    assert f"{words} in the fastest such layout ({gain / factor:.2f} to {gain * factor:.2f}, 80 %)." in (
        advise(made).sentence
    )


def test_divisions_of_states_are_those_of_the_rows():
    """Rows that say nothing are read as Megatron's distributed optimizer, which is ZeRO-1 and Megatron's alone."""
    found = defaultdict(set)
    for row in read_rows(ROWS):
        try:
            job = training_job(row)
        except ConfigError:
            continue
        if row.kind == "train" and (job.layout.sharding != Sharding.ZERO1 or job.framework == Framework.MEGATRON):
            found[job.framework].add(job.layout.sharding)
        assert not re.search(r"zero-?1", row["dp_or_fsdp"] + row.notes, re.IGNORECASE) or (
            job.framework == Framework.MEGATRON
        )
    assert found == {program: set(divisions) for program, divisions in DIVIDED_AS.items()}


def with_layouts(plan: Any, name: str, of_bf16: Sharding, of_fp8: Sharding) -> Any:
    """The plan of one recipe, with states divided so."""
    options = [option for option in plan.options if option.name in ("bf16", name)]
    for index, sharding in enumerate((of_bf16, of_fp8)):
        found = options[index].candidate
        layout = replace(found.job.layout, pp=1, vp=1, sharding=sharding)
        options[index] = replace(options[index], candidate=replace(found, job=replace(found.job, layout=layout)))
    return replace(plan, options=tuple(options))


@pytest.mark.parametrize("program", list(DIVIDED_AS))
@pytest.mark.parametrize("of_bf16", list(Sharding))
@pytest.mark.parametrize("of_fp8", list(Sharding))
def test_a_layout_of_either_that_no_row_of_the_program_has_is_a_transfer(made, program, of_bf16, of_fp8):
    plan = with_layouts(made, "tensorwise" if program == Framework.TITAN else "delayed", of_bf16, of_fp8)
    plan = replace(plan, request=replace(plan.request, framework=program))
    others = [each for each in dict.fromkeys((of_fp8, of_bf16)) if each not in DIVIDED_AS[program]]
    assert bool(plan.transferred) == bool(others)
    if others:
        words = f"by {program} none divides states as {' or '.join(others)}, only as {', '.join(DIVIDED_AS[program])}."
        assert words in plan.transferred
        assert f"The fastest that {program} has" in plan.transferred


def test_a_recipe_and_a_layout_of_others_are_both_named(made):
    plan = with_layouts(made, "delayed", Sharding.FSDP, Sharding.ZERO1)
    assert plan.transferred.startswith(
        "A transfer from other programs: of the published trainings by torchtitan none is with delayed, only with "
        "tensorwise, rowwise, mxfp8; none divides states as zero1, only as fsdp. The fastest"
    )


def test_a_program_none_of_whose_layouts_was_tried_has_no_gain_of_its_own(made):
    plan = replace(with_layouts(made, "delayed", Sharding.FSDP, Sharding.FSDP), own=None)
    assert plan.transferred.endswith("; none of the layouts that were tried is torchtitan's")
    assert "The fastest that" not in plan.transferred


@pytest.mark.long
@pytest.mark.parametrize(("name", "gpus"), [("llama-3-70b", 64), ("llama-3-405b", 1024), ("mixtral-8x7b", 64)])
def test_what_a_program_has_is_its_own_and_not_faster_than_the_best(name, gpus):
    made = make_plan(PlanRequest(model=find_model(name), hardware=find_hardware("h100"), gpus=gpus), CONSTANTS)
    own: Any = made.own
    best: Any = made.best_fp8
    assert own.name in TRAINED_WITH[Framework.TITAN]
    assert own.candidate.job.layout.sharding == Sharding.FSDP
    assert own.candidate.seconds["total"] >= best.candidate.seconds["total"]

"""What a program has of a plan's recipes and layouts, against searches of these alone."""

from dataclasses import replace
from typing import Any

import pytest

from octavo.planning import PlanRequest, advise, find_hardware, find_model, fitted_constants, make_plan
from octavo.planning.jobs import TRAINED_WITH, Framework, Sharding
from octavo.planning.search import best_layout

CONSTANTS = fitted_constants()
OF_ZERO1 = "ZeRO-1 is Megatron's, where torchtitan has FSDP2"


@pytest.fixture(scope="module")
def made() -> Any:
    """Its fastest recipe is delayed with a pipeline under ZeRO-1, neither of which torchtitan has."""
    return make_plan(PlanRequest(model=find_model("llama-3-8b"), hardware=find_hardware("h100"), gpus=8), CONSTANTS)


@pytest.mark.parametrize("larger", [False, True])
def test_the_fastest_that_the_program_has_is_named_with_its_gain(made, larger):
    """Over BF16, both without ZeRO-1, which BF16's fastest layout has for the larger model, but not for the smaller."""
    if larger:
        request = PlanRequest(model=find_model("llama-3-70b"), hardware=find_hardware("h100"), gpus=64)
        made = make_plan(request, CONSTANTS)
    job = made.bf16.job
    assert (job.layout.sharding == Sharding.ZERO1) == larger
    assert made.best_fp8.name not in TRAINED_WITH[Framework.TITAN]
    tried = list(dict.fromkeys(each.job.layout for each in best_layout(job, CONSTANTS)))[:24]
    own = [layout for layout in tried if layout.sharding != Sharding.ZERO1]
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


def with_layout(plan: Any, name: str, **settings: Any) -> Any:
    """The plan of one recipe, whose layout has these settings."""
    options = [option for option in plan.options if option.name in ("bf16", name)]
    found = options[1].candidate
    layout = replace(found.job.layout, pp=1, vp=1, **settings)
    options[1] = replace(options[1], candidate=replace(found, job=replace(found.job, layout=layout)))
    return replace(plan, options=tuple(options))


@pytest.mark.parametrize("program", [Framework.TITAN, Framework.MEGATRON])
@pytest.mark.parametrize("sharding", list(Sharding))
def test_zero1_is_a_transfer_for_torchtitan_alone(made, program, sharding):
    plan = with_layout(made, "tensorwise", sharding=sharding)
    plan = replace(plan, request=replace(plan.request, framework=program))
    is_transfer = program == Framework.TITAN and sharding == Sharding.ZERO1
    assert (OF_ZERO1 in plan.transferred) == is_transfer
    assert bool(plan.transferred) == is_transfer
    assert ("The fastest that torchtitan has" in plan.transferred) == is_transfer


def test_a_recipe_and_a_layout_of_others_are_both_named(made):
    plan = with_layout(made, "delayed", sharding=Sharding.ZERO1)
    words = "no published training by torchtitan is with delayed, only with tensorwise, rowwise, mxfp8; "
    assert plan.transferred.startswith(f"A transfer from other programs: {words}{OF_ZERO1}. The fastest")


def test_a_program_none_of_whose_layouts_was_tried_has_no_gain_of_its_own(made):
    plan = replace(with_layout(made, "delayed", sharding=Sharding.FSDP), own=None)
    assert plan.transferred.endswith("; none of the layouts that were tried is torchtitan's")
    assert "The fastest that" not in plan.transferred


@pytest.mark.long
@pytest.mark.parametrize(("name", "gpus"), [("llama-3-70b", 64), ("llama-3-405b", 1024), ("mixtral-8x7b", 64)])
def test_what_a_program_has_is_its_own_and_not_faster_than_the_best(name, gpus):
    made = make_plan(PlanRequest(model=find_model(name), hardware=find_hardware("h100"), gpus=gpus), CONSTANTS)
    own: Any = made.own
    best: Any = made.best_fp8
    assert own.name in TRAINED_WITH[Framework.TITAN]
    assert own.candidate.job.layout.sharding != Sharding.ZERO1
    assert own.candidate.seconds["total"] >= best.candidate.seconds["total"]

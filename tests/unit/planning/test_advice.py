"""The verdict: what decides it, by hand-made plans whose times are known."""

import math
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.planning import PlanRequest, advise, find_hardware, find_model, fitted_constants, make_plan, read_rows
from octavo.planning.advice import speedup_text
from octavo.planning.jobs import TRAINED_WITH, Framework, Layout
from octavo.planning.plan import LayerGain
from octavo.planning.precision import BF16
from octavo.planning.rows import training_job
from octavo.planning.search import best_layout

ROWS = Path(__file__).parents[3] / "benchmarks" / "planner_rows.csv"
CONSTANTS = fitted_constants()
STEPS_OF_FP8 = 105  # of 100 in BF16: "taking 5-10 percent more steps", says the article that octavo started from


@pytest.fixture(scope="module")
def made() -> Any:
    request = PlanRequest(model=find_model("smollm2-135m"), hardware=find_hardware("h100"), gpus=8, seq=2048)
    return make_plan(request, CONSTANTS)


def with_times(
    plan: Any, *, gain: float = 1.5, low: float = 1.0, gemm: float = 0.8, layers: tuple[LayerGain, ...] = ()
) -> Any:
    """A plan whose step takes 1 s in BF16, ``gemm`` of it in linear layers, and whose recipes all gain the same."""
    options = []
    for option in plan.options:
        speedup = None if option.speedup is None else (gain, low, 2 * gain - low)
        total = 1.0 if speedup is None else 1.0 / gain
        seconds = {"gemm": gemm, "attention": 1 - gemm, "total": 1.0}
        bf16 = replace(plan.bf16, seconds=seconds)
        candidate = option.candidate and replace(bf16, seconds=seconds | {"total": total})
        options.append(replace(option, candidate=candidate, speedup=speedup, bf16_here=bf16))
    return replace(plan, options=tuple(options), layers=layers, own=None)


def check(advice: Any, name: str) -> Any:
    return next(each for each in advice.checks if each.name == name)


def trainings():
    """Every FP8 training of the rows that is predicted."""
    for row in read_rows(ROWS):
        try:
            job = training_job(row)
        except ConfigError:
            continue
        if row.kind == "train" and not job.precision.is_bf16:
            yield job


def test_recipes_of_a_program_are_those_of_its_rows():
    found = defaultdict(set)
    for job in trainings():
        found[job.framework].add(job.precision.recipe.name.removesuffix("_te"))
    assert found == {program: set(names) for program, names in TRAINED_WITH.items()}


@pytest.mark.parametrize("program", [Framework.TITAN, Framework.MEGATRON])
def test_weights_are_gathered_as_codes_where_rows_say_so(made, program):
    said = {
        job.precision.recipe.name.removesuffix("_te")
        for job in trainings()
        if job.framework == program and job.precision.gathers_codes
    }
    plan = make_plan(replace(made.request, framework=program), CONSTANTS)
    gathers = {
        option.name for option in plan.options if option.candidate and option.candidate.job.precision.gathers_codes
    }
    assert gathers == said


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_a_program_is_named_for_the_recipes_of_its_rows_alone(made, recipe):
    plan = with_times(made)
    layout = Layout(gpus=8)
    options = tuple(
        replace(each, candidate=each.candidate and replace(each.candidate, job=replace(plan.bf16.job, layout=layout)))
        for each in plan.options
        if each.name in ("bf16", recipe)
    )
    sentence = advise(replace(plan, options=options)).sentence
    assert f"with recipe {recipe}" in sentence
    assert ("torchtitan is predicted" in sentence) == (recipe == "tensorwise")
    assert ("by torchtitan none is with delayed" in sentence) == (recipe == "delayed")


@pytest.mark.parametrize("gain", [0.9, 1.0, 1.02, 1.04, 1.06, 1.1, 1.19, 1.4])
def test_fp8_is_used_where_it_is_faster_with_the_further_steps_that_it_takes(made, gain):
    advice = advise(with_times(made, gain=gain))
    assert advice.use_fp8 == (STEPS_OF_FP8 / gain < 100)
    assert check(advice, "gain").holds == advice.use_fp8
    assert ("further steps" in advice.sentence) != advice.use_fp8


@pytest.mark.parametrize("low", [0.9, 0.99, 1.0, 1.2])
def test_a_gain_that_may_be_a_loss_is_to_be_measured_first(made, low):
    advice = advise(with_times(made, gain=1.3, low=low))
    assert advice.use_fp8 == (low >= 1)
    assert ("measure before deciding" in advice.sentence) != advice.use_fp8


@pytest.mark.parametrize(
    ("own", "is_used", "words"),
    [
        (
            (1.11, 0.99, 1.24),
            False,
            "at least 0.99 in 90 % of cases, where it would be slower; measure before deciding",
        ),
        (
            (1.04, 1.01, 1.07),
            False,
            "at least 1.01 in 90 % of cases; less than 1.05 does not pay for the further steps",
        ),
        ((1.2, 1.11, 1.3), True, ""),
        (None, True, ""),
    ],
)
def test_what_the_program_has_must_gain_enough_too(made, own, is_used, words):
    """The fastest recipe gains 1.5 and is none of torchtitan's, whose own the verdict is of first."""
    plan = with_times(made)
    delayed = next(each for each in plan.options if each.name == "delayed")
    tensorwise = next(each for each in plan.options if each.name == "tensorwise")
    plan = replace(plan, options=(plan.options[0], delayed), own=own and replace(tensorwise, speedup=own))
    advice = advise(plan)
    assert plan.transferred
    assert (advice.use_fp8, check(advice, "gain").holds) == (is_used, is_used)
    assert (advice.recipe, advice.program_recipe) == (
        ("delayed", own and "tensorwise") if is_used else ("bf16", "bf16")
    )
    transfer = "a program with torchtitan's costs is predicted to train 1.50 times as fast as in BF16 (1.00 to 2.00"
    assert transfer in advice.sentence
    if not is_used:
        first = f"tensorwise, the fastest that torchtitan has, is predicted {own[0]:.2f} times as fast as BF16"
        assert advice.sentence.startswith(f"Stay in BF16: {first}, {words}")
        assert f" With recipe delayed {transfer}" in advice.sentence


def test_the_recipe_that_a_program_has_is_both(made):
    plan = with_times(made)
    layout = Layout(gpus=8)
    options = tuple(
        replace(each, candidate=each.candidate and replace(each.candidate, job=replace(plan.bf16.job, layout=layout)))
        for each in plan.options
        if each.name in ("bf16", "tensorwise")
    )
    advice = advise(replace(plan, options=options))
    assert (advice.use_fp8, advice.recipe, advice.program_recipe) == (True, "tensorwise", "tensorwise")


@pytest.mark.parametrize("gemm", [0.02, 0.08, 0.11, 0.5, 1.0])
def test_what_linear_layers_take_limits_the_gain(made, gemm):
    """Amdahl: H100 multiplies FP8 twice as fast as BF16, so that half of what linear layers take could be saved."""
    advice = advise(with_times(made, gemm=gemm))
    of_gemms = check(advice, "share of linear layers")
    limit = 1 / (1 - gemm / 2)
    assert f"linear layers take {gemm:.0%} of BF16's step, attention {1 - gemm:.0%}" in of_gemms.sentence
    assert f"{limit:.2f} times as fast" in of_gemms.sentence
    assert of_gemms.holds == (STEPS_OF_FP8 / limit < 100)


def test_the_limit_waits_for_slower_gpus_too(made):
    """Half of the linear layers' 0.5 s are saved; a step waits for a quarter of the rest, in FP8 as in BF16."""
    plan = with_times(made)
    step = replace(plan.bf16, seconds={"gemm": 0.5, "attention": 0.3, "stragglers": 0.2, "total": 1.0})
    options = tuple(replace(each, bf16_here=step, candidate=each.candidate and step) for each in plan.options)
    sentence = check(advise(replace(plan, options=options)), "share of linear layers").sentence
    assert f"would be {1 / ((0.25 + 0.3) * 1.25):.2f} times as fast" in sentence


@pytest.mark.parametrize(
    ("kind", "words"),
    [("elementwise", "norms and activations"), ("data_parallel", "messages between copies and shards")],
)
def test_the_next_kind_of_work_is_named_in_the_words_of_the_tables(made, kind, words):
    plan = with_times(made)
    step = replace(plan.bf16, seconds={"gemm": 0.6, kind: 0.3, "attention": 0.1, "total": 1.0})
    options = tuple(replace(each, bf16_here=step, candidate=each.candidate and step) for each in plan.options)
    sentence = check(advise(replace(plan, options=options)), "share of linear layers").sentence
    assert sentence.startswith(f"linear layers take 60% of BF16's step, {words} 30%;")


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama-3-70b", "llama-3-405b"])
def test_no_gain_is_above_the_limit_that_is_printed_beside_it(name):
    """FP8's best layout is not BF16's there, and the limit is of FP8's."""
    request = PlanRequest(model=find_model(name), hardware=find_hardware("h100"), gpus=1024)
    large: Any = make_plan(request, CONSTANTS)
    best = large.best_fp8
    job = best.candidate.job
    advice = advise(large)
    match = re.search(r"([\d.]+) times as fast", check(advice, "share of linear layers").sentence)
    assert match is not None
    limit = float(match.group(1))
    in_bf16 = best_layout(job.at(BF16), CONSTANTS, [job.layout])[0]
    gain = in_bf16.seconds["total"] / best.candidate.seconds["total"]
    assert best.speedup[0] <= gain <= limit + 0.005
    assert job.layout != large.bf16.job.layout
    assert f"{best.name} with {job.layout}, where it is {gain:.2f} times as fast as BF16" in advice.sentence
    in_layout_of_bf16 = best_layout(job, CONSTANTS, [large.bf16.job.layout])[0]
    gain = large.bf16.seconds["total"] / in_layout_of_bf16.seconds["total"]
    assert f"in BF16's layout it is {gain:.2f} times as fast" in advice.sentence
    no_room = replace(large, options=tuple(replace(each, at_bf16_layout=None) for each in large.options))
    assert no_room.layouts_differ.endswith("; it does not fit in BF16's layout")


@pytest.mark.parametrize("tolerance", [0.0, 0.4, 0.499, 0.5, 0.6, 3.0, None])
def test_the_tolerance_decides_and_losing_layers_do_not(made, tolerance):
    """The article: no FP8 where "margin is less than 0.5 percent"."""
    losing = LayerGain(name="kv", share=0.1, bf16=1.0, fp8=2.0)
    advice = advise(with_times(made, layers=(losing,)), tolerance=tolerance)
    assert "keep in BF16: kv" in check(advice, "layers").sentence
    assert advice.use_fp8 == (tolerance is None or tolerance >= 0.5)
    if not advice.use_fp8:
        assert advice.sentence.startswith(f"Stay in BF16: {tolerance:g} % of perplexity may be lost")


def changes(monkeypatch, plan: Any, gain: Any, **settings: Any) -> list[str]:
    """What would change the verdict, where a request gains what ``gain`` says."""

    def planned(request: Any, constants: Any) -> Any:
        found = with_times(replace(plan, request=request), gain=gain(request))
        if request.hardware.has_fp8:
            return found
        refused = [replace(each, candidate=None, reason="no FP8 units") for each in found.options[1:]]
        return replace(found, options=(found.options[0], *refused))

    monkeypatch.setattr("octavo.planning.advice.make_plan", planned)
    return list(advise(planned(plan.request, CONSTANTS), CONSTANTS, **settings).changes)


TOLERANT = "with a tolerance of less than 0.5 % of perplexity: stay in BF16"
OLDER = "on a100: stay in BF16 or FP16"


@pytest.mark.parametrize(
    ("gain", "wanted"),
    [
        (lambda request: 1.5 if request.seq < 30000 else 1.0, [TOLERANT, "with a context of 32,768 tokens: s", OLDER]),
        (lambda request: 1.5 if request.seq > 600 else 1.0, [TOLERANT, "with a context of 512 tokens: s", OLDER]),
        (lambda request: 1.5 if request.gpus > 1 else 1.0, [TOLERANT, "on 1 GPU: stay in BF16", OLDER]),
        (lambda request: 1.5 if request.gpus < 500 else 1.0, [TOLERANT, "on 512 GPUs: stay in BF16", OLDER]),
        (lambda request: 1.5, [TOLERANT, OLDER]),
        (lambda request: 1.5 if request.gpus > 60 else 1.0, ["on 64 GPUs: use FP8 with recipe tensorwise, 1.50 times"]),
        (lambda request: 1.5 if request.model.hidden >= 4096 else 1.0, ["with the model llama-3-8b: use FP8"]),
        (lambda request: 1.5 if request.hardware.name == "b200" else 1.0, ["on b200: use FP8"]),
        (lambda request: 1.0, []),
    ],
)
def test_what_would_change_the_verdict_does(made, monkeypatch, gain, wanted):
    """On 8 GPUs with 2,048 tokens; the nearest value that turns the verdict round, and nothing that does not."""
    found = changes(monkeypatch, made, gain)
    assert len(found) == len(wanted)
    assert all(change.startswith(words) for change, words in zip(found, wanted, strict=True)), found


def test_newer_hardware_turns_the_verdict_on_an_a100(made, monkeypatch):
    old = replace(made, request=replace(made.request, hardware=find_hardware("a100")))
    assert [each.split(":")[0] for each in changes(monkeypatch, old, lambda request: 1.5)] == ["on h100", "on b200"]


@pytest.mark.parametrize("name", ["a100", "v100"])
@pytest.mark.parametrize("tolerance", [None, 0.1, 3.0])
def test_without_fp8_units_what_fp8_saves_there_is_all_that_is_said(made, name, tolerance):
    """No share of layers, gain or tolerance matters; V100 multiplies FP16, which no sentence may call BF16 alone."""
    old = make_plan(replace(made.request, hardware=find_hardware(name)), CONSTANTS)
    advice = advise(old, tolerance=tolerance)
    assert [(each.name, each.holds, each.sentence) for each in advice.checks] == [
        ("hardware", False, f"{name} has no FP8 units")
    ]
    assert advice.sentence.startswith(f"Stay in BF16 or FP16: {name} has no FP8 units. FP8 saves memory there")
    assert all(words in advice.sentence for words in ("weight_only", "8 bits", "emulated"))


def test_without_fp8_units_other_hardware_alone_is_tried(made, monkeypatch):
    seen: list[Any] = []

    def gain(request: Any) -> float:
        seen.append(request)
        return 1.5

    old = replace(made, request=replace(made.request, hardware=find_hardware("a100")))
    changes(monkeypatch, old, gain)
    assert [request.hardware.name for request in seen] == ["a100", "h100", "b200"]
    assert {replace(request, hardware=old.request.hardware) for request in seen} == {old.request}


def test_a_verdict_for_bf16_names_layouts_that_differ(made, monkeypatch):
    monkeypatch.setattr(type(made), "layouts_differ", property(lambda _: "BF16 is fastest with DDP"))
    sentence = advise(with_times(made, gain=1.02)).sentence
    assert sentence.startswith("Stay in BF16")
    assert sentence.endswith("BF16 is fastest with DDP.")


def test_a_smaller_model_may_turn_the_verdict_round(made, monkeypatch):
    large = replace(made, request=replace(made.request, model=find_model("llama-3-70b")))
    found = changes(monkeypatch, large, lambda request: 1.5 if request.model.hidden > 2048 else 1.0)
    assert [each.split(":")[0] for each in found if "model" in each] == ["with the model llama-3-1b"]


@pytest.mark.parametrize(("gain", "wanted"), [(1.5, ["at least 0.5 % of perplexity: use FP8"]), (1.0, [])])
def test_a_low_tolerance_is_all_that_can_change(made, monkeypatch, gain, wanted):
    found = changes(monkeypatch, made, lambda request: gain, tolerance=0.4)
    assert [each.removeprefix("with a tolerance of ") for each in found] == wanted


def test_a_batch_that_was_given_keeps_its_tokens(made, monkeypatch):
    seen: list[Any] = []

    def gain(request: Any) -> float:
        seen.append(request)
        return 1.5

    changes(monkeypatch, replace(made, request=replace(made.request, global_batch=64)), gain)
    of_contexts = {request.seq: request.global_batch for request in seen}
    assert of_contexts == {2048: 64, 512: 256, 8192: 16, 32768: 4}
    of_gpus = {(request.gpus, request.hardware.name) for request in seen if request.gpus != 8}
    assert of_gpus == {(1, "h100"), (64, "h100"), (512, "h100"), (2, "b200")}


def test_more_gpus_than_any_plan_has_are_not_tried(made, monkeypatch):
    """Eight and 64 times as many, up to 16,384."""
    seen = set()

    def gain(request: Any) -> float:
        seen.add(request.gpus)
        return 1.5

    changes(monkeypatch, replace(made, request=replace(made.request, gpus=2048)), gain)
    assert seen == {2048, 256, 32, 16384}


@pytest.mark.parametrize(
    ("gain", "wanted"),
    [
        (lambda request: 1.5 if request.gpus < 500 else 1.0, "on 512 GPUs with the same batch: stay in BF16"),
        (lambda request: 1.5 if request.gpus > 1 else 1.0, "on 1 GPU with the same batch: stay in BF16"),
        (
            lambda request: 1.5 if (request.gpus, request.hardware.name) == (2, "b200") else 1.0,
            "on 2 b200 with the same batch: use FP8 with recipe tensorwise, 1.50 times",
        ),
    ],
)
def test_a_batch_that_was_given_is_tried_on_fewer_more_and_larger_gpus(made, monkeypatch, gain, wanted):
    """On eight H100; without a batch the same numbers of GPUs have the usual batch each, and no such words."""
    fixed = replace(made, request=replace(made.request, global_batch=64))
    assert any(change.startswith(wanted) for change in changes(monkeypatch, fixed, gain))
    assert not any("the same batch" in change for change in changes(monkeypatch, made, gain))


def test_no_larger_gpu_is_tried_for_one_that_is_as_large(made, monkeypatch):
    seen: list[Any] = []

    def gain(request: Any) -> float:
        seen.append(request)
        return 1.0

    largest = replace(made.request, global_batch=64, hardware=find_hardware("b200"))
    changes(monkeypatch, replace(made, request=largest), gain)
    assert {request.gpus for request in seen} == {1, 8, 64, 512}


@pytest.mark.parametrize(("tolerance", "holds"), [(0.4, False), (0.5, None), (1.9, None), (2.0, True), (3.0, True)])
def test_the_tolerance_of_the_article_is_two_per_cent(made, tolerance, holds):
    assert check(advise(with_times(made), tolerance=tolerance), "tolerance").holds is holds


@pytest.mark.parametrize(("gain", "said"), [(1.0, False), (1.06, False), (1.13, True), (1.2, True), (1.25, False)])
def test_a_gain_whose_lower_end_ten_per_cent_more_steps_use_up_says_so(made, gain, said):
    """With the interval of the fit, 1.12 times up and down: 1.06 may be a loss, 1.25 is at least 1.11."""
    low = gain / math.exp(CONSTANTS.width("speedup", made.best_fp8.candidate.job))
    words = f"{low:.2f} does not pay for 10% more steps"
    assert (words in check(advise(with_times(made, gain=gain, low=low)), "gain").sentence) == said


@pytest.mark.parametrize(
    ("gain", "low", "words"),
    [
        (
            1.3,
            1.0999,
            "1.30 times as fast as BF16, at least 1.09 in 90 % of cases; 1.09 does not pay for 10% more steps",
        ),
        (1.3, 1.1, "1.30 times as fast as BF16, at least 1.10 in 90 % of cases"),
        (1.046, 0.99, "1.04 times as fast as BF16, at least 0.99 in 90 % of cases; less than 1.05 does not pay"),
        (1.3, 0.9999, "1.30 times as fast as BF16, at least 0.99 in 90 % of cases, where it would be slower"),
        (
            1.13,
            1.07,
            "1.13 times as fast as BF16, at least 1.07 in 90 % of cases; 1.07 does not pay for 10% more steps",
        ),
    ],
)
def test_no_figure_is_rounded_over_the_threshold_beside_it(made, gain, low, words):
    sentence = check(advise(with_times(made, gain=gain, low=low)), "gain").sentence
    assert words in sentence
    assert ("10% more" in sentence) == (1 <= low < 1.1)


@pytest.mark.parametrize(("gain", "low"), [(1.4478, 1.2968), (1.4522, 1.2951), (1.3, 1.0999), (1.0531, 0.9999)])
def test_one_gain_has_one_figure(made, gain, low):
    """The sentence's and the check's; tables use the same words."""
    advice = advise(with_times(made, gain=gain, low=low))
    words = check(advice, "gain").sentence
    assert f"{speedup_text(gain)} times as fast" in words
    assert f"at least {speedup_text(low)} in" in words
    if advice.use_fp8:
        assert f"train {speedup_text(gain)} times as fast as in BF16 ({speedup_text(low)} to " in advice.sentence
    assert abs(float(speedup_text(gain)) - gain) < 0.005


def test_every_condition_of_the_article_is_a_check(made):
    """Hopper or newer, latency, a converged model, tolerance; older GPUs, a small margin, research."""
    named = {each.name: each.holds for each in advise(with_times(made)).checks}
    assert list(named)[:6] == ["hardware", "gain", "tolerance", "latency", "converged model", "research"]
    assert [named[name] for name in ("latency", "converged model", "research")] == [None, None, None]

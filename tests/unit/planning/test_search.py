"""The search for layouts against trying every one."""

from dataclasses import replace
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.planning import PlanRequest, find_hardware, find_model, fitted_constants, make_plan
from octavo.planning.jobs import Layout, Recompute
from octavo.planning.search import best_layout, head_layers, imbalance, longest_stage, predicted
from octavo.planning.training_memory import training_memory

CONSTANTS = fitted_constants()


def plan(name: str, gpus: int, hardware: str = "h100", **settings: Any) -> Any:
    request = PlanRequest(model=find_model(name), hardware=find_hardware(hardware), gpus=gpus, **settings)
    return make_plan(request, CONSTANTS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "gpus", "hardware", "seq"),
    [
        ("llama-3-8b", 64, "h100", 8192),
        ("llama-3-70b", 128, "h100", 8192),
        ("llama-3-8b", 32, "h100", 131072),
        ("mixtral-8x7b", 64, "b200", 4096),
        ("qwen-3-30b-a3b", 16, "h200", 4096),
    ],
)
def test_fp8_recipes_have_the_best_of_all_layouts(name, gpus, hardware, seq):
    """A plan tries FP8 on BF16's best layouts alone; the best of all may be a percent faster, and not more."""
    made = plan(name, gpus, hardware, seq=seq)
    for option in made.options:
        if option.candidate is not None:
            best = best_layout(option.candidate.job, CONSTANTS)[0]
            assert option.candidate.seconds["total"] <= 1.01 * best.seconds["total"], option.name


@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-2-2b", "llama-3-405b"])
@pytest.mark.parametrize(("pp", "vp"), [(2, 1), (4, 1), (4, 2), (8, 1), (8, 3), (16, 1)])
def test_the_longest_stage_is_the_shortest_of_all_divisions(name, pp, vp):
    """Every number of layers of the last part is tried; the other parts share the rest."""
    model, layout = find_model(name), Layout(gpus=1024, pp=pp, vp=vp)
    layers, head, parts = model.layers, head_layers(model, seq=2048), pp * vp
    stages = []
    for last in range(layers + 1):
        part = -(-(layers - last) // (parts - 1))
        if last <= part:
            stages.append(max(vp * part, (vp - 1) * part + last + head))
    assert longest_stage(model, layout, seq=2048) == pytest.approx(min(stages))
    assert imbalance(model, layout, seq=2048) == pytest.approx(min(stages) / ((layers + head) / pp))


def test_a_head_is_worth_layers():
    """Llama 3 8B: 128256 x 4096 weights of the head, 218,103,808 of a layer, and attention to 1,024 earlier tokens.

    That makes 2.4 of its 32 layers. On four stages: 9, 9, 9 and 5 with the head, rather than 8, 8, 8 and 10.4.
    """
    model, layer = find_model("llama-3-8b"), 6 * 218_103_808 + 3 * 2 * 4096 * 2 * 1024
    assert head_layers(model, seq=2048) == pytest.approx(6 * 128256 * 4096 / layer, rel=1e-3)
    assert longest_stage(model, Layout(gpus=4, pp=4), seq=2048) == 9
    assert imbalance(model, Layout(gpus=4), seq=2048) == 1


def test_a_model_of_one_layer_is_planned_without_a_pipeline():
    model = replace(find_model("llama-3-8b"), layers=1)
    made = make_plan(PlanRequest(model=model, hardware=find_hardware("h100"), gpus=8, seq=2048), CONSTANTS)
    assert made.bf16.job.layout.pp == 1
    assert made.best_fp8 is not None


def test_a_candidate_computes_its_memory_once_a_policy():
    """A dozen times before, which was half of what octavo advise took for its plans."""
    step = plan("llama-3-8b", 8).bf16.job
    training_memory.cache_clear()
    predicted(step, CONSTANTS)
    assert training_memory.cache_info().misses == len(Recompute)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "gpus"), [("llama-3-405b", 1024), ("gemma-2-9b", 16), ("gemma-3-27b", 64), ("deepseek-v3", 1024)]
)
def test_pipelines_are_even_and_interleave_whole_groups(name, gpus):
    job = plan(name, gpus).bf16.job
    found = [each.job for each in best_layout(job, CONSTANTS) if each.job.layout.pp > 1]
    assert found
    for each in found:
        assert imbalance(each.model, each.layout, seq=each.seq) <= 1.1
        assert each.layout.vp == 1 or each.micro_batches % each.layout.pp == 0


def test_what_is_recomputed_in_words():
    small = plan("llama-3-1b", 8, seq=2048).bf16
    assert small.recompute == (Recompute.NONE, 0.0)
    assert small.recomputed == "none"
    job = replace(plan("llama-3-70b", 64).bf16.job, layout=Layout(gpus=64))
    large = best_layout(job, CONSTANTS, [job.layout])[0]
    share = large.recompute[1]
    assert 0 < share < 1
    assert large.recomputed == f"{share:.0%} full"
    assert replace(large, recompute=(Recompute.SELECTIVE, 1.0)).recomputed == "full"


@pytest.mark.parametrize(
    "settings",
    [{"gpus": 10**330}, {"gpus": 10**9 + 1}, {"seq": 10**330}, {"global_batch": 10**330}, {"global_batch": 10**12}],
)
def test_numbers_of_a_training_have_bounds(settings):
    given: dict[str, Any] = {"model": find_model("llama-3-8b"), "hardware": find_hardware("h100"), "gpus": 8}
    with pytest.raises(
        ConfigError, match="gpus and seq must be 1 to 1,000,000,000, and global-batch times seq 0 to 1,"
    ):
        PlanRequest(**(given | settings))


@pytest.mark.parametrize("settings", [{"gpus": 10**9}, {"seq": 1, "global_batch": 10**15}, {"seq": 10**9}])
def test_the_largest_training_has_a_plan_or_a_sentence(settings):
    given: dict[str, Any] = {"model": find_model("smollm2-135m"), "hardware": find_hardware("h100"), "gpus": 8}
    request = PlanRequest(**(given | settings))
    if request.seq == 10**9:
        with pytest.raises(ConfigError, match="does not fit into"):
            make_plan(request, CONSTANTS)
    else:
        assert make_plan(request, CONSTANTS).bf16.tokens_per_s_per_gpu > 0


@pytest.mark.parametrize(("seq", "hardware"), [(131072, "b200"), (65536, "h100")])
def test_one_sequence_is_as_long_as_memory_holds(seq, hardware):
    """SmolLM2 135M: 131,072 tokens need 52 GB of logits and 11 of blocks' inputs and one block, of 180."""
    step = plan("smollm2-135m", 1, hardware, seq=seq).bf16
    assert (step.job.layout.cp, step.job.micro_batch) == (1, 1)
    assert step.memory.total <= 0.95 * step.job.hardware.memory * 1e9
    assert step.memory.working > 8 * seq * 49152


def test_what_does_not_fit_is_refused_for_memory_alone():
    """Every refusal for memory is of a step that needs more than there is, with every block recomputed."""
    for name, hardware, seq in (("smollm2-135m", "h100", 262144), ("llama-3-8b", "h100", 8192)):
        job = replace(plan("smollm2-135m", 1, hardware, seq=2048).bf16.job, model=find_model(name), seq=seq)
        with pytest.raises(ConfigError, match="does not fit into 1 × 80 GB"):
            best_layout(replace(job, global_batch=1, micro_batch=1), CONSTANTS)
        smallest = replace(job, global_batch=1, micro_batch=1, layout=Layout(gpus=1))
        assert training_memory(smallest, Recompute.FULL).total > 0.95 * 80e9

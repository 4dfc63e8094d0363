"""The search for layouts against trying every one."""

from dataclasses import replace
from typing import Any

import pytest

from octavo.planning import PlanRequest, find_hardware, find_model, fitted_constants, make_plan
from octavo.planning.jobs import Layout, Recompute
from octavo.planning.search import best_layout

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


def pipeline(name: str, pp: int, vp: int) -> Any:
    job = plan(name, 1024, seq=2048).bf16.job
    return replace(job, layout=Layout(gpus=1024, pp=pp, vp=vp))


@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-2-2b", "llama-3-405b"])
@pytest.mark.parametrize(("pp", "vp"), [(2, 1), (4, 1), (4, 2), (8, 1), (8, 3), (16, 1)])
def test_the_longest_stage_is_the_shortest_of_all_divisions(name, pp, vp):
    """Every number of layers of the last part is tried; the other parts share the rest."""
    job = pipeline(name, pp, vp)
    layers, head, parts = job.model.layers, job.head_layers, pp * vp
    stages = []
    for last in range(layers + 1):
        part = -(-(layers - last) // (parts - 1))
        if last <= part:
            stages.append(max(vp * part, (vp - 1) * part + last + head))
    assert job.longest_stage == pytest.approx(min(stages))
    assert job.imbalance == pytest.approx(min(stages) / ((layers + head) / pp))


def test_a_head_is_worth_layers():
    """32 layers and a head of 2.4 on four stages: 9, 9, 9 and 5 with the head, rather than 8, 8, 8 and 10.4."""
    assert pipeline("llama-3-8b", 4, 1).longest_stage == 9


def test_the_head_counts_as_its_share_of_the_flops():
    """Llama 3 8B: 128256 x 4096 weights of the head, 218,103,808 of a layer, and attention to 1,024 earlier tokens."""
    job = pipeline("llama-3-8b", 1, 1)
    layer = 6 * 218_103_808 + 3 * 2 * 4096 * 2 * 1024
    assert job.head_layers == pytest.approx(6 * 128256 * 4096 / layer, rel=1e-3)
    assert job.imbalance == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "gpus"), [("llama-3-405b", 1024), ("gemma-2-9b", 16), ("gemma-3-27b", 64), ("deepseek-v3", 1024)]
)
def test_pipelines_are_even_and_interleave_whole_groups(name, gpus):
    job = plan(name, gpus).bf16.job
    found = [each.job for each in best_layout(job, CONSTANTS) if each.job.layout.pp > 1]
    assert found
    for each in found:
        assert each.imbalance <= 1.1
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

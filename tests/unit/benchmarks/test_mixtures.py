"""The benchmark of mixtures: one scale for all experts where it says so, runs that are kept, intervals by hand."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import octavo
from benchmarks import mixtures
from octavo import recipes
from octavo.functional import fp8_grouped_linear

NO_DATA: Any = None  # the replaced training reads none
SETTING = mixtures.Setting(
    model="mixtral", recipe="rowwise", seed=0, steps=2, batch_size=1, context=8, lr=1e-3, warmup=1, eval_tokens=16
)


def test_one_scale_is_that_of_all_experts_forward_and_backward():
    torch.manual_seed(0)
    x, weight = torch.randn(6, 16, requires_grad=True), torch.randn(2, 8, 16)
    weight[1] *= 100
    weight.requires_grad_()
    offsets, grad, recipe = torch.tensor([0, 3, 6]), torch.randn(6, 8), recipes.get("tensorwise")

    def results():
        y = fp8_grouped_linear(x, weight, None, offsets, recipe)
        return [y.detach(), *torch.autograd.grad(y, (x, weight), grad)]

    own = results()
    with mixtures.one_scale_for_all_experts():
        shared = results()
        assert not torch.equal(shared[0], own[0])
    pairs = ((x, octavo.E4M3), (weight.flatten(0, 1), octavo.E4M3), (grad, octavo.E5M2))
    a, b, g = (octavo.quantize(each.detach(), fmt).dequantize() for each, fmt in pairs)
    a, b, g = a.view(2, 3, 16), b.view(2, 8, 16), g.view(2, 3, 8)
    expected = [(a @ b.mT).view(6, 8), (g @ b).view(6, 16), g.mT @ a]
    for one, other in zip(shared, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))
    assert torch.equal(results()[0], own[0])


@pytest.mark.parametrize("cut", ['{"setting": {"model"', '{"setting": {"model": "mixtral"}', "{}}", "null]"])
def test_finished_runs_are_read_and_a_cut_line_is_dropped(tmp_path, monkeypatch, cut):
    trained = []

    def train(setting, _):
        trained.append(setting.seed)
        return [3.0], [2.0 + setting.seed, 4.0]

    monkeypatch.setattr(mixtures, "train", train)
    path = tmp_path / "runs.jsonl"
    first = mixtures.Runs(path)
    assert first.windows(SETTING, NO_DATA) == first.windows(SETTING, NO_DATA) == [2.0, 4.0]
    with path.open("a") as file:
        file.write(cut)
    again = mixtures.Runs(path)
    assert again.windows(SETTING, NO_DATA) == [2.0, 4.0]
    assert trained == [0]
    known, other = tmp_path / "known.jsonl.gz", tmp_path / "other.jsonl"
    mixtures.Runs(path, known).windows(replace(SETTING, seed=1), NO_DATA)
    assert trained == [0, 1]
    for one in (path, other, other):
        runs = mixtures.Runs(one, known)
        assert [runs.windows(replace(SETTING, seed=seed), NO_DATA)[0] for seed in (0, 1)] == [2.0, 3.0]
        assert [json.loads(line)["windows"][0] for line in one.read_text().splitlines()] == [2.0, 3.0]
    assert trained == [0, 1]


def test_runs_of_other_settings_do_not_replay_the_choices_of_these(tmp_path, monkeypatch):
    recorded = []

    def train(setting, _, *, weights=None):
        if weights is not None:
            recorded.append((setting.steps, setting.lr))
        for _ in range(setting.steps):
            torch.topk(torch.rand(1, 4), 2)
        return [3.0], [2.0]

    monkeypatch.setattr(mixtures, "train", train)
    runs, replayed = mixtures.Runs(tmp_path / "runs.jsonl"), replace(SETTING, replay=True)
    for changes in ({}, {"recipe": mixtures.BASE}, {"steps": 3}, {"steps": 1}, {"lr": 2e-3}):
        runs.windows(replace(replayed, **changes), NO_DATA)
    assert recorded == [(2, 1e-3), (3, 1e-3), (1, 1e-3), (2, 2e-3)]


def test_a_gap_is_judged_by_its_interval():
    table = [
        mixtures.row("m", "rowwise", [[1.0 + gap], [1.002 + gap], [1.004 + gap]], [[1.0]] * 3) for gap in (0, 1, -1)
    ]
    assert table[0][3] == f"+0.0020 ± {4.303 * 0.002 / math.sqrt(3):.4f}"
    assert [row[4] for row in table] == ["undecided", "missed", "met"]


def routed(model: Any) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Logits, scores and chosen experts of each router."""
    found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    routers = [module for path, module in model.named_modules() if path.endswith("mlp.gate")]
    handles = [router.register_forward_hook(lambda _, __, output: found.append(output)) for router in routers]
    model(input_ids=torch.arange(16).view(1, 16))
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("name", mixtures.MODELS)
def test_replayed_routers_choose_what_was_chosen_with_scores_of_their_own(name, tmp_path):
    model, other = (mixtures.build(name, 64, 16, seed=seed) for seed in (0, 1))
    with mixtures.recording(tmp_path / "routes.pt"):
        expected = routed(model)
    own = routed(other)
    with mixtures.replaying(tmp_path / "routes.pt"):
        replayed = routed(other)
    assert len(expected) == 4
    for (logits, scores, indices), (_, _, wanted), (_, _, before) in zip(replayed, expected, own, strict=True):
        assert torch.equal(indices, wanted)
        assert not torch.equal(indices, before)
        kept = logits.float().softmax(-1).gather(-1, wanted)
        torch.testing.assert_close(scores, kept / kept.sum(-1, keepdim=True))
    with pytest.raises(AssertionError, match="every choice"), mixtures.replaying(tmp_path / "routes.pt"):
        pass

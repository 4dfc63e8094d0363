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


def test_finished_runs_are_read_and_a_cut_line_is_dropped(tmp_path, monkeypatch):
    trained = []

    def train(setting, _):
        trained.append(setting.seed)
        return [3.0], [2.0 + setting.seed, 4.0]

    monkeypatch.setattr(mixtures, "train", train)
    path = tmp_path / "runs.jsonl"
    first = mixtures.Runs(path)
    assert first.windows(SETTING, NO_DATA) == first.windows(SETTING, NO_DATA) == [2.0, 4.0]
    with path.open("a") as file:
        file.write('{"setting": {"model"')
    again = mixtures.Runs(path)
    assert again.windows(SETTING, NO_DATA) == [2.0, 4.0]
    assert trained == [0]
    mixtures.Runs(path).windows(replace(SETTING, seed=1), NO_DATA)
    assert trained == [0, 1]
    assert [json.loads(line)["windows"][0] for line in path.read_text().splitlines()] == [2.0, 3.0]


def test_the_interval_is_students():
    mean, half = mixtures.interval([0.001, 0.002, 0.006])
    assert mean == pytest.approx(0.003)
    assert half == pytest.approx(4.303 * math.sqrt(7e-6) / math.sqrt(3), rel=1e-3)
    assert math.isnan(mixtures.interval([0.001])[1])
    assert mixtures.row("m", "rowwise", [[1.0, 2.0]], [[1.0, 1.0]])[3:] == ["+0.5000 ± nan", "undecided"]
    verdicts = [mixtures.against_bar(*gap) for gap in ((0.001, 0.003), (0.001, 0.005), (0.02, 0.005))]
    assert verdicts == ["met", "undecided", "missed"]


@pytest.mark.parametrize("name", mixtures.MODELS)
def test_models_have_four_to_ten_million_parameters(name):
    pytest.importorskip("transformers")
    assert 4e6 < sum(each.numel() for each in mixtures.build(name, 2048, 64, 0).parameters()) < 10e6

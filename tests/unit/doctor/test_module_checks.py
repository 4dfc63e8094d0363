"""Alignment and batch norms by their formulas, in NumPy's float64."""

import copy
import math

import numpy as np
import pytest
import torch

import octavo
from octavo.doctor.module_checks import alignments, gated_pairs, watching_batch_norms
from octavo.models import Llama
from tests.tiny_llama import tiny_llama_config

TINY = tiny_llama_config(
    vocab_size=16, hidden_size=8, intermediate_size=24, num_heads=2, num_kv_heads=1, max_positions=8
)


def weights(model, path):
    return [model.get_parameter(f"{path}.{name}.weight") for name in ("gate_proj", "up_proj")]


@pytest.mark.parametrize("recipe", [None, "tensorwise"])
def test_the_most_aligned_rows_of_every_pair(recipe):
    model = Llama(TINY)
    if recipe:
        octavo.convert(model, recipe)
    with torch.no_grad():
        gate, up = weights(model, "model.layers.1.mlp")
        gate[5] = -3 * up[5] + 0.1 * torch.randn(8) * up[5].norm()
    found = alignments(model)
    assert found.keys() == {"model.layers.0.mlp", "model.layers.1.mlp"}
    for path, value in found.items():
        rows, others = (weight.detach().double().numpy() for weight in weights(model, path))
        cosines = (rows * others).sum(1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(others, axis=1)
        assert value.item() == pytest.approx(np.abs(cosines).max(), rel=1e-5)
    assert found["model.layers.1.mlp"] > 0.98


def test_a_fused_projection_is_two_halves():
    mlp = octavo.nn.LayerNormMLP(8, 24, activation="swiglu", bias=False)
    gate, up = mlp.fc1.weight.detach()[:24], mlp.fc1.weight.detach()[24:]
    up[3] = -2 * gate[3]
    assert alignments(mlp)[""].item() == pytest.approx(1, abs=1e-6)
    pair = gated_pairs(mlp)[""]
    assert all(torch.equal(one, other) for one, other in zip(pair, (gate, up), strict=True))


def test_pairs_by_the_path_of_their_module():
    shapes = {"w1": (24, 8), "w2": (8, 24), "w3": (24, 8)}
    linears = {name: torch.nn.Linear(columns, rows) for name, (rows, columns) in shapes.items()}
    (path, (gate, up)), *others = gated_pairs(torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict(linears)})).items()
    assert path == "mlp"
    assert gate is linears["w1"].weight
    assert up is linears["w3"].weight
    assert not others


def test_rows_of_zeros_are_not_aligned():
    model, path = Llama(TINY), "model.layers.0.mlp"
    torch.nn.init.zeros_(weights(model, path)[0])
    assert alignments(model.get_submodule(path))[""].item() == 0


def looked_at(model, *batches):
    found: dict[str, torch.Tensor] = {}
    with watching_batch_norms(model, found):
        for x in batches:
            model(x)
    return {path: value[0].item() for path, value in found.items()}


def scatter(n):
    """Two standard deviations of log2 of the variance of n Gaussian values, by drawing them."""
    drawn = np.random.default_rng(0).standard_normal((400_000, n)).var(axis=1, ddof=1)
    return 2 * np.log2(drawn).std()


@pytest.mark.parametrize("kind", ["1d", "2d", "3d"])
def test_how_far_a_batch_lies_from_the_running_statistics(kind):
    norm = getattr(torch.nn, f"BatchNorm{kind}")(5)
    x = torch.randn(16, 5, *([3] * (int(kind[0]) - (kind == "1d"))))
    x *= 40
    x[:, 2] *= 1e4
    running = norm.running_var.double().numpy().copy()
    variance = np.moveaxis(x.double().numpy(), 1, 0).reshape(5, -1).var(axis=1, ddof=1)
    median = np.median(np.abs(np.log2(variance / running)))
    assert looked_at(norm, x) == {"": pytest.approx(median - scatter(16), rel=0.003)}


def test_the_last_batch_of_a_step_in_training_counts():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    other, (small, large) = copy.deepcopy(model), (torch.randn(64, 4), torch.randn(64, 4) * 100)
    both = looked_at(model, small, large)
    other(small)
    assert both == looked_at(other, large)
    assert both.keys() == {"1"}
    assert looked_at(model.eval(), large) == {}


def test_norms_without_a_past_and_batches_of_one_say_nothing():
    assert looked_at(torch.nn.BatchNorm1d(4, track_running_stats=False), torch.randn(8, 4)) == {}
    norm = torch.nn.BatchNorm1d(4)
    found: dict[str, torch.Tensor] = {}
    with watching_batch_norms(norm, found):
        norm(input=torch.randn(8, 4))
        with pytest.raises(ValueError, match="more than 1 value"):
            norm(torch.randn(1, 4))
    assert not found
    assert not norm._forward_pre_hooks


def test_a_constant_channel_has_no_say():
    norm = torch.nn.BatchNorm1d(2)
    assert math.isnan(looked_at(norm, torch.ones(8, 2))[""])
    x = torch.randn(512, 2) * 64
    x[:, 0] = 3.0
    norm = torch.nn.BatchNorm1d(2)
    assert looked_at(norm, x)[""] == pytest.approx(12, abs=0.5)


@pytest.mark.parametrize("batch", [4, 8, 16, 64])
def test_batches_of_one_distribution_are_near_their_running_statistics(batch):
    """Though the worst of 512 channels lies 10x off, and one is constant."""
    norm = torch.nn.BatchNorm1d(512)
    for _ in range(60):
        x = torch.randn(batch, 512)
        x[:, 7] = 1.0
        assert looked_at(norm, x)[""] < 0.5
    assert looked_at(norm, 30 * torch.randn(batch, 512))[""] > 2


def test_watching_batch_norms_records_the_batch_size():
    found: dict[str, torch.Tensor] = {}
    norm = torch.nn.BatchNorm2d(4)
    with watching_batch_norms(norm, found):
        norm(torch.randn(6, 4, 3, 3))
    assert found[""][1].item() == 6

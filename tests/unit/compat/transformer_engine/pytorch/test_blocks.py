"""Calibrating blocks; groups of ranks are in tests/contract/test_ranks.py."""

import threading
from typing import Any

import pytest
import torch

from octavo.compat.transformer_engine import pytorch as te
from octavo.compat.transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from octavo.errors import ConfigError

RECIPE = DelayedScaling(amax_history_len=4)


def _history(layer, path="linear"):
    return layer.get_submodule(path).amax_history


def test_calibration_computes_in_high_precision_and_records_inputs_and_weights():
    layer: Any = te.Linear(4, 4).eval()
    for amax in (3.0, 5.0):
        x = torch.full((2, 4), amax)
        with torch.no_grad():
            plain = layer(x)
            with te.autocast(enabled=False, calibrating=True, recipe=RECIPE):
                assert torch.equal(layer(x / 2), plain / 2 + layer.bias / 2)
                assert torch.equal(layer(x), plain)
    history = _history(layer)
    weight = layer.weight.abs().max().item()
    assert history.window[0].tolist() == [5.0, 3.0, -1.0, -1.0]
    assert history.window[1].tolist() == [weight, weight, -1.0, -1.0]
    assert history.window[2].tolist() == [-1.0] * 4
    assert history.amax.tolist() == [5.0, weight, 0.0]


def test_a_block_in_fp8_scales_from_what_calibration_recorded():
    calibrated, trained = te.Linear(16, 16), te.Linear(16, 16)
    trained.load_state_dict(calibrated.state_dict())
    x, other = torch.randn(8, 16), torch.randn(8, 16) / 3
    with te.autocast(enabled=False, calibrating=True, recipe=RECIPE), torch.no_grad():
        calibrated(x)
    with te.autocast(recipe=RECIPE):
        trained(x)
    for layer in (calibrated, trained):
        layer.zero_grad()
    with te.autocast(recipe=RECIPE):
        ours, theirs = calibrated(other), trained(other)
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, te.Linear.forward(calibrated, other))


def test_training_in_high_precision_records_every_step_once():
    layer = te.LayerNormMLP(8, 16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    weights = []
    for _ in range(3):
        weights.append(layer.fc1_weight.detach().abs().max().item())
        with te.autocast(enabled=False, calibrating=True, recipe=RECIPE):
            loss = layer(torch.randn(2, 8)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for path in ("layer.fc1", "layer.fc2"):
        assert (_history(layer, path).window[0] > 0).tolist() == [True, True, True, False]
    assert _history(layer, "layer.fc1").window[1, :3].tolist() == weights[::-1]


def test_an_open_fp8_step_is_closed_before_calibration_records():
    layer = te.Linear(4, 4)
    with te.autocast(recipe=RECIPE):
        layer(torch.full((2, 4), 7.0)).sum().backward()
    with te.autocast(enabled=False, calibrating=True, recipe=RECIPE):
        layer(torch.full((2, 4), 2.0))
    assert _history(layer).window[0, :2].tolist() == [2.0, 7.0]


def test_only_layers_that_compute_without_fp8_and_delayed_recipes_are_calibrated():
    layer, x = te.Linear(4, 4), torch.ones(2, 4)
    with te.autocast(enabled=False, recipe=RECIPE):
        layer(x)
    with te.autocast(enabled=False, calibrating=True, recipe=Float8CurrentScaling()):
        layer(x)
    assert _history(layer) is None
    with te.autocast(enabled=True, calibrating=True, recipe=RECIPE):
        layer(x).sum().backward()
    assert _history(layer).pending[0] == 1.0  # a step in FP8, which the next block ends


def test_layers_of_another_thread_are_not_calibrated():
    layer = te.Linear(4, 4)
    with te.autocast(enabled=False, calibrating=True, recipe=RECIPE):
        thread = threading.Thread(target=layer, args=(torch.ones(2, 4),))
        thread.start()
        thread.join()
    assert _history(layer) is None


def test_calibration_for_another_history_is_refused():
    layer = te.Linear(4, 4)
    with te.autocast(recipe=RECIPE):
        layer(torch.ones(2, 4)).sum().backward()
    other = DelayedScaling(amax_history_len=9)
    with (
        pytest.raises(ConfigError, match="use one delayed recipe"),
        te.autocast(enabled=False, calibrating=True, recipe=other),
    ):
        layer(torch.ones(2, 4))


def test_a_printed_layer_says_the_recipe_in_force():
    layer = te.LayerNormLinear(4, 4)
    assert "recipe=bf16" in repr(layer)
    with te.autocast():
        assert "recipe=delayed_te" in repr(layer)
        with te.autocast(enabled=False):
            assert "recipe=bf16" in repr(layer)
    assert "recipe=bf16" in repr(layer)

"""Modules that FP8 does not suit: both sides of every threshold."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import octavo
from octavo.doctor import Severity, Thresholds, watch
from octavo.doctor.rules.modules import batch_norm, sensitive_module, slow_layer, slow_layers
from tests.unit.doctor.synthetic_series import FIRST, SECOND, healthy_sample, looks, renamed

LIMITS = Thresholds()


def shaped(sample, **sizes):
    """The look with layers of other shapes, [in, out]."""
    shapes = {path: {"in_features": k, "out_features": n} for path, (k, n) in sizes.items()}
    return replace(sample, layers={path: facts | shapes.get(path, {}) for path, facts in sample.layers.items()})


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("lm_head", "a head"),
        ("model.score", "a head"),
        ("layers.0.mlp.gate", None),
        ("layers.0.mlp.gate_proj", None),
        ("layers.0.router", "a router"),
        ("head.dense", None),
        ("model.lm_head.base_layer", "a head"),
        ("layers.0.router.base_layer", "a router"),
    ],
)
def test_layers_with_sensitive_names_are_warned_about(path, what):
    found = list(sensitive_module(looks(renamed(healthy_sample("tensorwise"), {SECOND: path})), LIMITS))
    assert [(one.path, one.severity) for one in found] == ([(path, Severity.WARN)] if what else [])
    assert all(one.cause.startswith(f"this is {what}") for one in found)


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ({"mlp.gate": (256, 64)}, ["mlp.gate"]),
        ({"mlp.gate": (256, 65)}, []),
        ({"mlp.gate": (64, 192), "mlp.up": (64, 192)}, []),
        ({"mlp.gate": (256, 32), "mlp.up": (256, 32)}, []),
        ({"mlp.gate": (256, 32), "mlp.up": (256, 64)}, ["mlp.gate"]),
    ],
)
@pytest.mark.parametrize("wrapper", ["", ".base_layer"])
def test_a_gate_is_a_router_where_it_narrows_alone(sizes, found, wrapper):
    sample = renamed(healthy_sample("tensorwise"), {FIRST: "mlp.up", SECOND: f"mlp.gate{wrapper}"})
    sample = shaped(sample, **{name.replace("gate", f"gate{wrapper}"): size for name, size in sizes.items()})
    result = list(sensitive_module(looks(sample), LIMITS))
    assert [one.path for one in result] == [f"{path}{wrapper}" for path in found]
    assert all("a router" in one.cause for one in result)


def test_sensitive_layer_in_high_precision_is_not_reported():
    sample = renamed(healthy_sample("tensorwise"), {SECOND: "lm_head"})
    sample = replace(sample, casts={key: v for key, v in sample.casts.items() if key.path != "lm_head"})
    assert not list(sensitive_module(looks(sample), LIMITS))


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ({SECOND: (64, 384)}, [SECOND]),
        ({SECOND: (64, 383)}, []),
        ({SECOND: (16, 96)}, []),
        ({SECOND: (64, 512), FIRST: (512, 64)}, []),
        ({SECOND: (64, 1024), FIRST: (512, 64)}, []),
        ({SECOND: (64, 512), FIRST: (512, 65)}, [SECOND]),
    ],
)
def test_layer_is_a_head_from_six_times_the_width_of_the_model(sizes, found):
    """An adapter's matrix of 16 to 96 is none: other layers of its model have more inputs; nor what widens an MLP."""
    sample = healthy_sample("tensorwise")
    attention = {f"attention.{name}": sample.layers[FIRST] for name in "qkvo"}
    sample = shaped(replace(sample, layers=sample.layers | attention), **sizes)
    result = sensitive_module(looks(sample, casts={(SECOND, "grad_output"): {"underflow_fraction": 0.01}}), LIMITS)
    assert [one.path for one in result] == found


@pytest.mark.parametrize(("down", "found"), [("mlp.down_proj", 0), ("mlp.down_proj.base_layer", 0), ("o_proj", 1)])
def test_widening_mlp_layer_is_recognised_inside_an_adapter(down, found):
    """PEFT moves a layer to "base_layer" of what stands in its place; of the MLP's layers all, or only some."""
    up = "mlp.up_proj.base_layer"
    adapter = {"in_features": 8, "out_features": 512, "casts": {}}
    sample = renamed(healthy_sample("tensorwise"), {FIRST: down, SECOND: up})
    sample = shaped(sample, **{up: (64, 512), down: (512, 64)})
    sample = replace(sample, layers={**sample.layers, "mlp.up_proj.lora_B.default": adapter})
    result = list(sensitive_module(looks(sample, casts={(up, "grad_output"): {"underflow_fraction": 0.01}}), LIMITS))
    assert [one.path for one in result] == [up] * found


def test_a_wide_layer_that_loses_nothing_is_healthy():
    """In another module than its down projection, say; a head by its name is named all the same."""
    sample = shaped(healthy_sample("tensorwise"), **{SECOND: (64, 512)})
    changes = {(SECOND, "grad_output"): {"underflow_fraction": 0}}
    assert not list(sensitive_module(looks(sample, casts=changes), LIMITS))


@pytest.mark.parametrize(
    ("lost", "severity"),
    [(0.5, Severity.FAIL), (0.49, Severity.WARN), ([0, 0, 0.9, 0.9, 0, 0], Severity.WARN)],
)
def test_a_head_whose_gradient_vanishes(lost, severity):
    sample = renamed(healthy_sample("tensorwise"), {SECOND: "lm_head"})
    series = looks(sample, casts={("lm_head", "grad_output"): {"underflow_fraction": lost}})
    (found,) = sensitive_module(series, LIMITS)
    assert found.severity is severity


@pytest.mark.parametrize(
    ("distance", "interval", "found"),
    [
        ([2, 2, 2], 10, 1),
        ([2, 1.9, 2], 10, 1),
        ([1.9, 1.9, 2], 10, 0),
        ([2, 2, 2], 9, 0),
        ([2, 2], 20, 0),
        ([9, 0.1, 9, 0.1], 10, 1),
        ([9, 0.1, 9, 0.1, 0.1], 10, 0),
        ([8, 8, 3.9, 3.9], 10, 0),
        ([8, 8, 4, 4], 10, 1),
        ([np.inf] * 3, 10, 1),
    ],
)
def test_a_batch_norm_that_does_not_settle(distance, interval, found):
    series = looks(count=len(distance), interval=interval, modules={"batch_norm": {"norm": distance}})
    assert len(list(batch_norm(series, LIMITS))) == found


@pytest.mark.parametrize(
    ("rows", "severity"),
    [
        ([64, 16, 64, 64], Severity.NOTE),
        ([64, 17, 64, 64], None),
        ([64, 2, 64, 2], Severity.WARN),
        ([64, 64, 2], Severity.NOTE),
        ([64, 2], None),
        ([np.nan, 64, 2, 64], Severity.NOTE),
    ],
)
def test_a_batch_norm_whose_batches_differ_in_size(rows, severity):
    series = looks(count=len(rows), modules={"batch_norm_rows": {"norm": rows}})
    assert [one.severity for one in batch_norm(series, LIMITS)] == [severity] * (severity is not None)


@pytest.mark.parametrize(("sizes", "severity"), [((64, 2), Severity.NOTE), ((64, 64), None)])
def test_watched_training_with_varying_batch_sizes_reports_them(sizes, severity):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 8))
    octavo.convert(model)
    optimizer = torch.optim.AdamW(model.parameters())
    watcher = watch(model, optimizer, interval=7)
    for step in range(60):
        with watcher.step():
            model(torch.randn(sizes[step % 2], 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = [one for one in watcher.findings() if one.code == "batch-norm"]
    assert [(one.path, one.severity) for one in found] == [("1", severity)] * (severity is not None)


def test_a_batch_norm_that_learns_its_statistics():
    """Running variance 1, batches' 0.01: the distance after n steps of momentum 0.1."""
    after = np.arange(10, 110, 10)
    distance = np.log2((0.01 + 0.99 * 0.9**after) / 0.01)
    series = looks(count=10, interval=10, modules={"batch_norm": {"norm": distance}})
    assert not list(batch_norm(series, LIMITS))


@pytest.mark.parametrize(("size", "found"), [((4096, 4095), 1), ((4096, 4096), 0)])
def test_layers_that_are_too_small(size, found):
    sample = shaped(healthy_sample("tensorwise"), first=(4096, 16384), second=size)
    result = list(slow_layers(looks(sample).layers, LIMITS))
    assert [(one.severity, one.path, one.evidence["layers"]) for one in result] == [(Severity.NOTE, "", 1.0)] * found


def test_small_layers_are_slow_on_a_gpu_only():
    sample = healthy_sample("tensorwise")
    assert not list(slow_layer(looks(sample), LIMITS))
    on_gpu = replace(sample, layers={path: facts | {"device": "cuda"} for path, facts in sample.layers.items()})
    (found,) = slow_layer(looks(on_gpu), LIMITS)
    assert found.cause.startswith("2 of 2 FP8 layers have fewer than 1.68e+07 weights")


def test_high_precision_layer_is_never_reported_as_slow():
    facts = {"in_features": 8, "out_features": 8, "casts": {}}
    assert not list(slow_layers({FIRST: facts}, LIMITS))


def test_every_small_layer_is_named():
    paths = [f"layers.{index}.{name}" for name in ("k_proj", "o_proj") for index in range(3)] + ["score"]
    (found,) = slow_layers(
        {path: {"in_features": 8, "out_features": 8 + i, "casts": ["E4M3"]} for i, path in enumerate(paths)}, LIMITS
    )
    assert found.cause.endswith("save: layers.*.k_proj (3), layers.*.o_proj (3), score")
    assert found.places == tuple(paths)

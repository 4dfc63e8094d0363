"""Norms whose weights are cast, and smoothed MLPs: what a run's model computes, in which steps, and what is refused."""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from octavo.errors import ConfigError
from octavo.nn import RMSNorm
from octavo.training.config import ParallelConfig
from octavo.training.loop import train
from octavo.training.precision import apply_recipe
from octavo.training.run_folder import load_run
from octavo.training.setup import build_model
from tests.unit.training.tiny_runs import tiny_config


def blocks_of_32(weight):
    """MX: a power of two for each 32, by the floor of the largest exponent; values beyond 448 saturate."""
    out = np.empty_like(weight)
    for start in range(0, len(weight), 32):
        block = weight[start : start + 32]
        scale = 2.0 ** (np.floor(np.log2(np.abs(block).max())) - 8)
        codes = np.clip(block / scale, -448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
        out[start : start + 32] = codes.astype(np.float64) * scale
    return out


def test_a_norms_weight_is_that_of_its_codes():
    config = tiny_config(recipe="mxfp8", recipe_options={"scale_rounding": "floor"}, cast_norms=True)
    model, _ = build_model(dataclasses.replace(config, model=dataclasses.replace(config.model, hidden_size=48)), 300)
    norm: Any = model.model.norm
    with torch.no_grad():
        norm.weight.copy_(1 + 0.5 * torch.randn(48, generator=torch.Generator().manual_seed(0)))
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(1), requires_grad=True)
    wanted: Any = RMSNorm(48)
    wanted.weight.data = torch.from_numpy(blocks_of_32(norm.weight.detach().numpy()))
    assert not torch.equal(wanted.weight, norm.weight)
    assert torch.equal(norm(x), wanted(x))
    for one in (norm, wanted):
        one(x).square().sum().backward()
    assert torch.equal(norm.weight.grad, wanted.weight.grad)  # the gradient passes the cast


def test_every_norm_is_cast_and_only_in_fp8_phases():
    config = tiny_config(
        recipe="mxfp8", cast_norms=True, smooth_swiglu=True, precision_schedule=(("bf16", 0.0), ("fp8", 0.5))
    )
    model, _ = build_model(config, 300)
    mlp: Any = model.model.layers[0].mlp
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    assert len(norms) == 3
    for step, on in ((1, False), (4, True), (3, False)):
        apply_recipe(model, config.training, step=step)
        assert all((norm.weight_cast is not None) == on for norm in norms)
        assert mlp.is_smooth == on


@pytest.mark.long
def test_a_smooth_run_is_another_run_in_fp8_only(tmp_path, data):
    weights = {}
    changes: dict[str, dict[str, Any]] = {
        "plain": {},
        "smooth": {"smooth_swiglu": True},
        "phases": {"smooth_swiglu": True, "precision_schedule": (("bf16", 0.0),)},
        "bf16": {"recipe": "bf16"},
    }
    for name, training in changes.items():
        train(tiny_config(**({"recipe": "tensorwise", "aligned_channels": 4} | training)), tmp_path / name, data=data)
        weights[name] = load_run(tmp_path / name).model.state_dict()
    key = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(weights["plain"][key], weights["smooth"][key])
    assert all(torch.equal(weights["phases"][name], weights["bf16"][name]) for name in weights["bf16"])


@pytest.mark.parametrize(
    ("training", "sentence"),
    [
        ({"recipe": "bf16", "cast_norms": True}, "training.cast_norms needs an FP8 recipe, not 'bf16'"),
        ({"recipe": "fp32", "smooth_swiglu": True}, "training.smooth_swiglu needs an FP8 recipe, not 'fp32'"),
        ({"recipe": "delayed", "cast_norms": True}, "weights have dynamic scales, and 'delayed' has delayed ones"),
        ({"recipe": "rowwise", "smooth_swiglu": True, "cache_weights": True}, "turn cache_weights off"),
        (
            {"recipe": "rowwise", "as_served_by": "vllm-token", "cast_norms": True},
            "training.cast_norms changes the forward pass, and vllm-token does not",
        ),
    ],
)
def test_what_has_no_effect_is_refused(training, sentence):
    with pytest.raises(ConfigError, match=sentence):
        tiny_config(**training)


@pytest.mark.parametrize("training", [{"moments": "fp8"}, {"cast_norms": True}, {}])
def test_what_ranks_cannot_divide_is_refused(training):
    config = tiny_config(recipe="rowwise", **training)
    names = [f"training.{name}" for name in training]
    if not training:
        config, names = (
            dataclasses.replace(config, model=dataclasses.replace(config.model, qk_norm=True)),
            ["model.qk_norm"],
        )
    for parallel in (ParallelConfig(tensor=2), ParallelConfig(tensor=2, shard=2)):
        with pytest.raises(ConfigError, match=f"{names[0]} cannot be divided among ranks"):
            dataclasses.replace(config, parallel=parallel)
    assert dataclasses.replace(config, parallel=ParallelConfig(shard=2)).parallel.shard == 2


def test_divided_weights_are_not_smoothed():
    config = tiny_config(recipe="rowwise", smooth_swiglu=True)
    with pytest.raises(ConfigError, match="scales whole weights"):
        dataclasses.replace(config, parallel=ParallelConfig(tensor=2))
    assert not config.with_recipe("bf16").training.smooth_swiglu

"""Moments in FP8 against ml_dtypes' rounding, AdamW written out, and runs that are interrupted."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from octavo.formats import E4M3, E5M2
from octavo.models import Llama
from octavo.training.loop import train
from octavo.training.moments import Moments, keep_in_fp8, rounded_moment
from octavo.training.run_folder import load_run
from tests.unit.training.tiny_runs import tiny_config

TYPES = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}


def written_out(moment, fmt, *, expanded):
    """Each block by itself, in FP64; the scale is amax / limit, and codes are those of ml_dtypes."""
    result, largest = np.zeros(moment.shape), float(ml_dtypes.finfo(TYPES[fmt]).max)
    smallest = float(ml_dtypes.finfo(TYPES[fmt]).smallest_subnormal)
    for row in range(moment.shape[0]):
        for start in range(0, moment.shape[1], 128):
            block = moment[row, start : start + 128].astype(np.float64)
            magnitudes = np.abs(block)[block != 0]
            if not len(magnitudes):
                continue
            power = 1.0
            if expanded and magnitudes.max() > magnitudes.min():
                power = math.log(largest / smallest) / math.log(magnitudes.max() / magnitudes.min())
            unit = magnitudes.max() if expanded else 1.0
            values = ((np.abs(block) / unit) ** power).astype(np.float32)
            scale = np.float32(largest / float(values.max()))
            codes = (values * scale).astype(np.float32).astype(TYPES[fmt]).astype(np.float64)
            decoded = (codes * np.float32(1 / scale)) ** (1 / power) * unit
            result[row, start : start + 128] = np.sign(block) * decoded
    return result


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("expanded", [False, True])
def test_values_are_those_of_codes_in_blocks(fmt, expanded):
    generator = torch.Generator().manual_seed(0)
    moment = torch.randn(5, 300, generator=generator) * 10 ** (4 * torch.randn(5, 300, generator=generator))
    moment[1, :128], moment[2, 128:256], moment[3, 7] = 0, 3.0, 0
    found = rounded_moment(moment, fmt, expanded=expanded)
    wanted = torch.from_numpy(written_out(moment.numpy(), fmt, expanded=expanded))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=0)
    assert torch.equal(found == 0, wanted == 0)


def test_expansion_keeps_small_second_moments_from_zero():
    """A quotient with a second moment of 0 is a step of m / eps."""
    moment = 10 ** torch.linspace(-14, -2, 128)[None]
    assert (rounded_moment(moment, E5M2, expanded=False) == 0).any()
    assert (rounded_moment(moment, E5M2, expanded=True) > 0).all()


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("exponent", [-60, -30, 30, 60])
def test_expansion_is_the_same_at_every_scale(fmt, exponent):
    """|m|^k is not: it leaves FP32 where magnitudes are small, and where they differ little, whose k is large."""
    generator = torch.Generator().manual_seed(1)
    moment = torch.randn(2, 256, generator=generator)
    moment[1] = 1 + moment[1] / 100
    found = rounded_moment(moment * 2.0**exponent, fmt, expanded=True) / 2.0**exponent
    assert torch.equal(found, rounded_moment(moment, fmt, expanded=True))
    torch.testing.assert_close(found[1], moment[1], rtol=2e-3, atol=0)


@pytest.mark.parametrize("moments", [Moments.FP8, Moments.FP8_EXPANDED])
def test_steps_are_those_of_an_adamw_that_stores_codes(moments):
    """Matrices' moments are decoded, updated and rounded again; vectors' stay FP32."""
    torch.manual_seed(0)
    matrix, vector = torch.randn(4, 200, requires_grad=True), torch.randn(200, requires_grad=True)
    values = {p: p.detach().double().clone() for p in (matrix, vector)}
    means = {p: torch.zeros_like(value) for p, value in values.items()}
    squares = {p: torch.zeros_like(value) for p, value in values.items()}
    optimizer = torch.optim.AdamW([matrix, vector], lr=0.1, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    keep_in_fp8(optimizer, moments)
    for step in range(1, 6):
        for p in (matrix, vector):
            p.grad = torch.randn_like(p) * 10 ** torch.randn_like(p)
            gradient = p.grad.double()
            means[p] = 0.9 * means[p] + 0.1 * gradient
            squares[p] = 0.95 * squares[p] + 0.05 * gradient**2
            change = means[p] / (1 - 0.9**step) / ((squares[p] / (1 - 0.95**step)).sqrt() + 1e-8)
            values[p] -= 0.1 * change
        optimizer.step()
        for p, value in values.items():
            torch.testing.assert_close(p.detach().double(), value, rtol=1e-4, atol=1e-5)
            state = optimizer.state[p]
            if p.ndim == 2:  # rounding is not continuous: go on from the optimizer's own
                for name, fmt, own in (("exp_avg", E4M3, means), ("exp_avg_sq", E5M2, squares)):
                    wanted = rounded_moment(own[p].float(), fmt, expanded=moments == Moments.FP8_EXPANDED)
                    # FP32 cancels digits of a block's smallest magnitude, on which all powers of the block depend.
                    far = 1e-3 if moments == Moments.FP8_EXPANDED else 1e-5
                    equal = torch.isclose(state[name], wanted, rtol=far, atol=0)
                    assert equal.float().mean() > 0.97, "but for numbers next to a tie"
                    assert not torch.equal(state[name], own[p].float())
                    own[p] = state[name].double()


@pytest.mark.parametrize("moments", [Moments.FP8, Moments.FP8_EXPANDED])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, data, moments):
    config = tiny_config(moments=moments, steps=6)
    train(config, tmp_path / "whole", data=data)
    short = config.with_training(checkpoint_interval=3)

    def stop(event):
        if getattr(event, "step", 0) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(short, tmp_path / "parts", data=data, on_event=stop)
    train(short, tmp_path / "parts", data=data, resume=True)
    states = [load_run(tmp_path / name).model.state_dict() for name in ("whole", "parts")]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    train(tiny_config(steps=6), tmp_path / "fp32", data=data)
    assert not torch.equal(load_run(tmp_path / "fp32").model.lm_head.weight, states[0]["lm_head.weight"])


def test_a_model_with_norms_of_queries_is_trained(tmp_path, data):
    config = tiny_config(steps=6)
    config = type(config)(model=type(config.model)(**_shape(config), qk_norm=True), training=config.training)
    train(config, tmp_path / "run", data=data)
    run = load_run(tmp_path / "run")
    assert isinstance(run.model, Llama)
    norm = run.model.get_parameter("model.layers.0.self_attn.q_norm.weight")
    assert not torch.equal(norm, torch.ones_like(norm))
    assert run.model.config.qk_norm == "head"


def _shape(config):
    return {name: getattr(config.model, name) for name in type(config.model).__slots__ if name != "qk_norm"}

"""A linear layer under a profile: operands, the roundings around them, and weights of a file."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

import octavo
from octavo.engines import PROFILES, Products, get, linear_as, quantize_as, weight_as
from octavo.engines.model import EngineLinear
from octavo.errors import ConfigError
from octavo.numerics import Accumulate, Scaling
from tests.oracle.engines.adversarial import input_cast

X = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
W = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)) / 16
BIAS = torch.arange(5.0)


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_approximates_the_layer(name):
    profile = PROFILES[name]
    assert profile.input is not None
    amax = None if profile.input.scaling == Scaling.DYNAMIC else X.abs().amax()
    y = linear_as(X[None], W.bfloat16(), profile, bias=BIAS, input_amax=amax)
    expected = F.linear(X, W, BIAS)
    assert y.shape == (1, 3, 5)
    assert y.dtype == profile.output
    assert (y[0].float() - expected).norm() < 0.06 * expected.norm()


def test_codes_are_multiplied_with_their_scales():
    profile = get("vllm-token-cuda")
    a, b = quantize_as(X.bfloat16(), input_cast("vllm-token-cuda")), quantize_as(W, profile.weight)
    expected = octavo.scaled_mm(a, b, out_dtype=torch.bfloat16, accumulate=Accumulate.HOPPER_FAST)
    assert torch.equal(linear_as(X, W, profile), expected)


def test_decoded_operands_are_multiplied_in_the_activations_dtype():
    profile = get("compressed-tensors")
    assert profile.products == Products.DECODED
    a, b = quantize_as(X.bfloat16(), input_cast("compressed-tensors")), quantize_as(W.bfloat16(), profile.weight)
    assert torch.equal(linear_as(X, W.bfloat16(), profile), F.linear(a.dequantize(), b.dequantize()))


def test_an_input_is_rounded_before_its_cast_unless_the_norm_casts():
    profile = get("octavo-token")
    narrow = replace(profile, activations=torch.bfloat16)
    assert torch.equal(linear_as(X, W, narrow), linear_as(X.bfloat16().float(), W, profile))
    assert not torch.equal(linear_as(X, W, narrow), linear_as(X, W, profile))
    assert torch.equal(linear_as(X, W, replace(narrow, fused_cast=True)), linear_as(X, W, profile))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_codes_of_a_file_are_kept_or_cast_again(engine):
    kept, profile = get(f"{engine}-block"), get(f"{engine}-block-ue8m0")
    codes = quantize_as(W, kept.weight)
    assert not torch.equal(codes.scale.log2(), codes.scale.log2().round())
    assert weight_as(codes, kept) is codes
    again, blocks = weight_as(codes, profile), codes.dequantize().float().split(128, 1)
    scales = [2 ** (block.abs().max() / 448).log2().ceil() for block in blocks]
    assert torch.equal(again.fp32_scale, torch.stack(scales)[None])
    expected = [(block / scale).to(torch.float8_e4m3fn) for block, scale in zip(blocks, scales, strict=True)]
    assert torch.equal(again.data.float(), torch.cat([each.float() for each in expected], 1))


def test_inputs_that_are_not_cast():
    profile = replace(get("octavo-token"), input=None)
    decoded = quantize_as(W, profile.weight).dequantize()
    assert torch.equal(linear_as(X, W, profile), F.linear(X, decoded))


def test_an_engine_may_be_its_name():
    profile = get("vllm-token")
    assert torch.equal(linear_as(X, W, "vllm-token"), linear_as(X, W, profile))
    assert torch.equal(weight_as(W, "vllm-token").scale, weight_as(W, profile).scale)
    with pytest.raises(ConfigError, match="there is no engine 'vllm'"):
        linear_as(X, W, "vllm")
    with pytest.raises(ConfigError, match="an engine is a profile or its name, such as 'vllm-token', not a Tensor"):
        linear_as(X, W, cast(Any, W))


@pytest.mark.parametrize("name", ["vllm-tensor", "te-delayed"])
def test_inputs_that_an_engine_does_not_measure_need_a_scale_or_an_amax(name):
    says = f"{name} does not measure inputs; give input_scale, or an input_amax such as input_amaxes"
    with pytest.raises(ConfigError, match=says):
        linear_as(X, W, name)
    with pytest.raises(ConfigError, match=says):
        EngineLinear(weight_as(W, name), None, get(name))
    largest = X.bfloat16().float().abs().amax()
    assert linear_as(X, W, name, input_amax=largest).isfinite().all()


@pytest.mark.parametrize("name", ["vllm-tensor", "te-delayed", "modelopt"])
@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("input_scale", torch.nan, "every input_scale must be finite and positive, not nan"),
        ("input_scale", torch.inf, "every input_scale must be finite and positive, not inf"),
        ("input_scale", -1.0, "every input_scale must be finite and positive, not -1.0"),
        ("input_scale", 0.0, "every input_scale must be finite and positive, not 0.0"),
        ("input_scale", [1.0], r"needs a scale of shape \(\), not \(1,\)"),
        ("input_amax", torch.nan, "every input_amax must be finite and not negative, not nan"),
        ("input_amax", torch.inf, "every input_amax must be finite and not negative, not inf"),
        ("input_amax", -1.0, "every input_amax must be finite and not negative, not -1.0"),
        ("input_amax", [1.0, 2.0], r"needs a scale of shape \(\), not \(2,\)"),
    ],
)
def test_scales_and_amaxes_that_no_tensor_has_are_refused(name, option, value, says):
    given: dict[str, Any] = {option: torch.tensor(value)}
    with pytest.raises(ConfigError, match=says):
        linear_as(X, W, name, **given)
    layer = EngineLinear(weight_as(W, name), None, get(name), **given)
    with pytest.raises(ConfigError, match=says):
        layer(X)


@pytest.mark.parametrize("option", ["input_scale", "input_amax"])
def test_a_number_in_place_of_a_scale_is_refused(option):
    given: dict[str, Any] = {option: 1.0}
    with pytest.raises(ConfigError, match=f"{option} must be a tensor in the scale's shape, not 1.0"):
        linear_as(X, W, "vllm-tensor", **given)


def test_an_input_of_zeros_has_the_amax_0():
    assert linear_as(torch.zeros(2, 256), W, "modelopt", input_amax=torch.tensor(0.0)).eq(0).all()

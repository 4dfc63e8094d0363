"""Each field of a cast, on tensors small enough to compute by hand."""

import math
import re
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from octavo.engines import AmaxOf, Application, Division, EngineCast, PowerOfTwo, Saturation, quantize_as
from octavo.errors import ConfigError
from octavo.formats import E4M3, E4M3_FNUZ, E5M2, E8M0
from octavo.numerics import PerBlock, PerRow, PerTensor, Scaling

X = torch.tensor([[1.0, -3.0, 0.5], [0.0, 7.0, -7.0]])


def scales(x=X, **fields):
    return quantize_as(x, EngineCast(granularity=PerRow(), **fields)).scale.flatten().tolist()


@pytest.mark.parametrize("division", Division)
def test_divisions_differ_by_roundings_alone(division):
    assert scales(division=division) == pytest.approx([3 / 448, 7 / 448], rel=1e-6)


def test_the_limit_is_that_of_scales_and_of_codes():
    cast = EngineCast(format=E4M3_FNUZ, limit=224.0)
    q = quantize_as(torch.tensor([1.0, 1e9]), cast, scale=torch.tensor(1.0))
    assert q.data.float().tolist() == [1.0, 224.0]
    assert scales(format=E4M3_FNUZ, limit=224.0) == [torch.tensor(3.0).div(224).item(), 7 / 224]


def test_floors():
    assert scales(amax_floor=7.0) == [7 / 448] * 2
    assert scales(scale_floor=1.0) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("power", "expected"),
    [(PowerOfTwo.SCALE_UP, [2.0**-7, 2.0**-6]), (PowerOfTwo.SCALE_UP_BY_LOG2, [2.0**-7, 2.0**-6])],
)
def test_scales_up_to_a_power_of_two(power, expected):
    assert scales(power_of_two=power) == expected  # 3/448 is above 2^-8, 7/448 is 2^-6


@pytest.mark.parametrize("power", [PowerOfTwo.ENCODE_DOWN, PowerOfTwo.ENCODE_DOWN_BY_LOG2])
def test_encode_scales_down_to_a_power_of_two(power):
    assert scales(power_of_two=power, division=Division.LIMIT_BY_AMAX) == [2.0**-7, 2.0**-6]


def test_a_power_of_two_stays_by_bits():
    x = torch.exp2(torch.arange(-120.0, 120.0))[:, None] * 448
    assert torch.equal(
        quantize_as(x, EngineCast(granularity=PerRow(), power_of_two=PowerOfTwo.SCALE_UP)).scale, x / 448
    )


@pytest.mark.parametrize(
    ("of", "expected"),
    [(AmaxOf.ALL, [math.inf, math.nan]), (AmaxOf.NUMBERS, [math.inf, 2.0]), (AmaxOf.FINITE, [1.0, 2.0])],
)
def test_elements_of_an_amax(of, expected):
    x = torch.tensor([[448.0, -math.inf], [896.0, math.nan]])
    assert scales(x, amax_of=of) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("saturation", "expected"),
    [
        (Saturation.PROPAGATE, [math.nan, math.nan, math.nan, 448.0]),
        (Saturation.SATURATE, [448.0, -448.0, math.nan, 448.0]),
        (Saturation.NAN_TO_LIMIT, [448.0, -448.0, 448.0, 448.0]),
        (Saturation.NAN_TO_MINUS_LIMIT, [448.0, -448.0, -448.0, 448.0]),
    ],
)
def test_infinities_and_nan(saturation, expected):
    x = torch.tensor([math.inf, -math.inf, math.nan, 1e9])
    codes = quantize_as(x, EngineCast(saturation=saturation), scale=torch.tensor(1.0)).data
    assert codes.float().tolist() == pytest.approx(expected, nan_ok=True)


def test_groups_of_zeros():
    zeros = torch.zeros(2, 4)
    assert math.isnan(quantize_as(zeros, EngineCast()).data.float()[0, 0])
    q = quantize_as(zeros, EngineCast(zero_scale=1.0))
    assert (q.scale.item(), q.data.float().abs().max().item()) == (1.0, 0.0)
    assert quantize_as(zeros.bfloat16(), EngineCast(zero_scale="epsilon", divided_in=None)).scale == 2.0**-7
    small = torch.full((2, 4), 2.0**-30)
    flushed = EngineCast(zero_scale=0.5, zero_amax=2.0**-24, zero_encode=1.0)
    assert quantize_as(small, flushed).data.float().abs().max() == 0


def test_dtypes_of_both_operations():
    x = torch.tensor([1.0, 0.3007]).bfloat16()
    wide = quantize_as(x, EngineCast())
    narrow = quantize_as(x, EngineCast(divided_in=None, applied_in=None, application=Application.DIVIDE))
    assert narrow.scale == (torch.tensor(1.0).bfloat16() / 448).float() != wide.scale


def test_infinite_encode_scales():
    tiny, largest = torch.tensor([2.0**-130]), torch.finfo(torch.float32).max
    cast = EngineCast(division=Division.LIMIT_BY_AMAX)
    assert quantize_as(tiny, cast).scale == 0
    assert quantize_as(tiny, replace(cast, infinite_encode=torch.float32)).scale == 1 / largest
    of_tensor = quantize_as(tiny.bfloat16(), replace(cast, infinite_encode="tensor"))
    assert of_tensor.scale == torch.tensor(torch.finfo(torch.bfloat16).max).reciprocal()


def test_amaxes_and_scales_from_elsewhere():
    given = quantize_as(X, EngineCast(), amax=torch.tensor(896.0))
    assert given.scale == 2.0
    assert torch.equal(given.data.float(), quantize_as(X, EngineCast(), scale=torch.tensor(2.0)).data.float())


def test_scales_that_are_not_finite():
    x = torch.tensor([1.0, math.inf])
    assert quantize_as(x, EngineCast(nonfinite_scale=1.0)).scale == 1.0
    assert quantize_as(x, EngineCast(nonfinite_scale=1.0)).data.float().tolist() == [1.0, 448.0]


def test_bytes_of_scales():
    q = quantize_as(X, EngineCast(power_of_two=PowerOfTwo.SCALE_UP, scale_format=E8M0))
    assert q.scale == 127 - 6
    with pytest.raises(ConfigError, match="E8M0 holds powers of two"):
        EngineCast(scale_format=E8M0)
    assert EngineCast().largest == E4M3.max


def test_infinities_that_propagate_keep_their_sign():
    x = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan])
    cast = EngineCast(format=E5M2, amax_of=AmaxOf.FINITE, saturation=Saturation.PROPAGATE)
    values = quantize_as(x, cast).data.float()
    assert values[1:3].tolist() == [math.inf, -math.inf]
    assert values[3].isnan()


@pytest.mark.parametrize("scaling", [Scaling.STATIC, Scaling.DELAYED])
def test_a_cast_that_measures_nothing_needs_a_scale_or_an_amax(scaling):
    cast = EngineCast(scaling=scaling)
    with pytest.raises(ConfigError, match=f"with {scaling} scaling does not measure the tensor; give scale= or amax="):
        quantize_as(X, cast)
    assert quantize_as(X, cast, amax=torch.tensor(7.0)).scale == quantize_as(X, EngineCast()).scale


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ConfigError, match=f"a float16, bfloat16 or float32 tensor, not {dtype}; convert it"):
        quantize_as(X.to(dtype), EngineCast())


@pytest.mark.parametrize("name", ["scale", "amax"])
def test_a_scale_has_the_shape_of_its_groups(name):
    for granularity, shape in ((PerRow(), "(2, 1)"), (PerTensor(), "()"), (PerBlock(1, 2), "(2, 2)")):
        says = re.escape(f"of (2, 3) needs a scale of shape {shape}, not (3,)")
        with pytest.raises(ConfigError, match=says):
            quantize_as(X, EngineCast(granularity=granularity), **{name: torch.ones(3)})
    with pytest.raises(ConfigError, match=f"{name} must be a tensor in the scale's shape, not 2.0"):
        quantize_as(X, EngineCast(), **{name: cast(Any, 2.0)})

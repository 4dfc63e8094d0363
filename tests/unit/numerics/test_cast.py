"""Shapes, strides, dtypes, policies and refusals of the casts. Their roundings: tests/oracle/test_cast_nearest.py."""

import math

import pytest
import torch

from octavo.errors import ConfigError
from octavo.formats import BF16, E4M3, E5M2, E8M0, FP8_FORMATS
from octavo.numerics import Nonfinite, Overflow, cast_nearest, cast_stochastic
from octavo.numerics.cast import may_hold_nonfinite, narrowed
from tests.oracle.rounding_table import assert_same_codes, expected_codes

CASTS = {
    "nearest": cast_nearest,
    "stochastic": lambda x, fmt, scale=None, **policy: cast_stochastic(
        x, fmt, scale, generator=torch.Generator().manual_seed(0), **policy
    ),
}
every_cast = pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
every_format = pytest.mark.parametrize("fmt", FP8_FORMATS, ids=str)


@every_cast
@every_format
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 5)])
def test_shape_and_dtype(cast, fmt, shape):
    codes = cast(torch.randn(shape), fmt)
    assert (codes.shape, codes.dtype) == (shape, fmt.torch_dtype)


@every_format
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_strides_do_not_matter(fmt, dtype):
    x = torch.randn(12, 10).mul(100).to(dtype)
    views = [x.t(), x[::3, 1::2], x.flip(0), x[:, :1].expand(12, 6), x.view(3, 4, 10).permute(2, 0, 1)]
    for view in views:
        assert_same_codes(cast_nearest(view, fmt), expected_codes(view.float().numpy(), fmt), fmt)


@every_cast
def test_input_and_scale_stay_as_they_were(cast):
    x, scale = torch.tensor([1e9, -math.inf, math.nan, 0.1]), torch.tensor(3.0)
    before = x.clone(), scale.clone()
    cast(x, E4M3, scale)
    assert torch.equal(x.view(torch.int32), before[0].view(torch.int32))
    assert torch.equal(scale, before[1])


@every_format
def test_scales_broadcast(fmt):
    x = torch.randn(4, 6)
    scales = torch.rand(4, 1) * 100
    rows = [cast_nearest(row, fmt, scale) for row, scale in zip(x, scales.flatten(), strict=True)]
    together = cast_nearest(x, fmt, scales)
    assert torch.equal(together.view(torch.uint8), torch.stack([row.view(torch.uint8) for row in rows]))


@every_cast
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("fmt", "nonfinite", "infinity"),
    [
        (E4M3, Nonfinite.PROPAGATE, math.nan),
        (E4M3, Nonfinite.SATURATE, 448.0),
        (E5M2, Nonfinite.PROPAGATE, math.inf),
        (E5M2, Nonfinite.SATURATE, 57344.0),
    ],
)
def test_infinite_inputs_follow_their_policy_and_nan_stays(cast, dtype, fmt, nonfinite, infinity):
    x = torch.tensor([math.inf, -math.inf, math.nan, 1.0], dtype=dtype)
    values = cast(x, fmt, nonfinite=nonfinite).float()
    expected = torch.tensor([infinity, -infinity, math.nan, 1.0])
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("fmt", "overflow", "beyond"),
    [
        (E4M3, Overflow.SATURATE, 448.0),
        (E4M3, Overflow.NONFINITE, math.nan),
        (E5M2, Overflow.SATURATE, 57344.0),
        (E5M2, Overflow.NONFINITE, math.inf),
    ],
)
@pytest.mark.parametrize("nonfinite", Nonfinite)
def test_finite_overflow_follows_its_own_policy(fmt, overflow, beyond, nonfinite):
    """Also where the float32 product is infinite: the input was finite."""
    x = torch.tensor([1e30, -1e30])
    for encode_scale in (None, torch.tensor(1e30)):
        values = cast_nearest(x, fmt, encode_scale, overflow=overflow, nonfinite=nonfinite).float()
        torch.testing.assert_close(values, torch.tensor([beyond, -beyond]), rtol=0, atol=0, equal_nan=True)


@every_cast
def test_float64_beyond_float32_is_infinite(cast):
    values = cast(torch.tensor([1e300, 2.0], dtype=torch.float64), E5M2).float()
    assert values.tolist() == [math.inf, 2.0]


@every_cast
def test_policies_may_be_given_by_name(cast):
    assert cast(torch.tensor([math.inf]), E4M3, nonfinite="saturate").float().item() == 448.0


def test_overflow_may_be_given_by_name():
    assert cast_nearest(torch.tensor([1e9]), E5M2, overflow="nonfinite").float().item() == math.inf  # type: ignore[arg-type]


@every_cast
@pytest.mark.parametrize(
    "x",
    [
        torch.arange(3),
        torch.tensor([True]),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2).to(torch.float8_e4m3fn),
    ],
    ids=lambda x: str(x.dtype),
)
def test_refuses_what_is_not_high_precision(cast, x):
    with pytest.raises(
        ConfigError, match=rf"must be a float16, bfloat16, float32 or float64 tensor, not {x.dtype}; convert"
    ):
        cast(x, E4M3)


@every_cast
@pytest.mark.parametrize(("fmt", "named"), [(BF16, "BF16"), (E8M0, "E8M0"), ("E4M3", "'E4M3'")])
def test_refuses_what_is_not_an_fp8_format(cast, fmt, named):
    with pytest.raises(ConfigError, match=rf"cannot cast to {named}; use one of octavo.formats.E4M3, "):
        cast(torch.ones(2), fmt)


@every_cast
def test_refuses_an_unknown_policy_for_infinities(cast):
    with pytest.raises(ConfigError, match="nonfinite must be one of propagate, saturate, not 'drop'"):
        cast(torch.ones(2), E4M3, nonfinite="drop")


def test_refuses_an_unknown_policy_for_overflow():
    with pytest.raises(ConfigError, match="overflow must be one of saturate, nonfinite, not 'wrap'"):
        cast_nearest(torch.ones(2), E4M3, overflow="wrap")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 500, 1022])
def test_may_hold_nonfinite_sees_one_bad_element(dtype, bad, place):
    x = torch.randn(1023).to(dtype)
    assert not may_hold_nonfinite(x)
    x[place] = bad
    assert may_hold_nonfinite(x)


def test_may_hold_nonfinite_of_nothing():
    assert not may_hold_nonfinite(torch.ones(0))


def test_may_hold_nonfinite_at_the_largest_values():
    assert not may_hold_nonfinite(torch.tensor([torch.finfo(torch.float32).max, torch.finfo(torch.float32).min]))


def test_narrowed_leaves_what_float32_holds():
    x = torch.randn(3).bfloat16()
    assert narrowed(x) is x
    assert narrowed(x.double()).dtype is torch.float32

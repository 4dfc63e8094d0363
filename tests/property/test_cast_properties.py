"""Laws that rounding obeys for any float32: order, distance, sign, idempotence."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.formats import FP8_FORMATS, Format
from octavo.numerics import Nonfinite, Overflow, cast_nearest, cast_stochastic

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
FORMAT = st.sampled_from(FP8_FORMATS)


def in_range(fmt: Format) -> st.SearchStrategy[float]:
    return st.floats(-fmt.max, fmt.max, width=32)


def half_step(value: float, fmt: Format) -> float:
    """Half the distance between the neighbours of ``value``, from its exponent alone."""
    exponent = max(math.frexp(value)[1] - 1, 1 - fmt.bias)
    return math.ldexp(0.5, exponent - fmt.mantissa_bits)


def rounded(values: list[float], fmt: Format) -> torch.Tensor:
    return cast_nearest(torch.tensor(values), fmt).float()


@given(fmt=FORMAT, values=st.lists(FINITE, min_size=2, max_size=30))
def test_rounding_keeps_order(fmt, values):
    assert (rounded(sorted(values), fmt).diff() >= 0).all()


@given(data=st.data(), fmt=FORMAT)
def test_error_is_at_most_half_a_step_inside_the_range(data, fmt):
    value = data.draw(in_range(fmt))
    assert abs(rounded([value], fmt).item() - value) <= half_step(value, fmt)


@given(fmt=FORMAT, values=st.lists(FINITE, min_size=1, max_size=30), overflow=st.sampled_from(Overflow))
def test_sign_symmetry(fmt, values, overflow):
    x = torch.tensor(values)
    positive, negative = (cast_nearest(v, fmt, overflow=overflow).float() for v in (x, -x))
    torch.testing.assert_close(positive, -negative, rtol=0, atol=0, equal_nan=True)


@given(fmt=FORMAT, values=st.lists(FINITE, min_size=1, max_size=30))
def test_rounded_values_do_not_move_again(fmt, values):
    once = cast_nearest(torch.tensor(values), fmt)
    assert torch.equal(cast_nearest(once.float(), fmt).view(torch.uint8), once.view(torch.uint8))


@given(fmt=FORMAT, values=st.lists(FINITE, min_size=1, max_size=30))
def test_saturation_stays_in_range_and_policies_agree_inside(fmt, values):
    x = torch.tensor(values)
    saturating, other = (cast_nearest(x, fmt, overflow=overflow).float() for overflow in Overflow)
    assert (saturating.abs() <= fmt.max).all()
    inside = other.isfinite()
    assert torch.equal(saturating[inside], other[inside])
    assert (saturating[~inside].abs() == fmt.max).all()


@given(fmt=FORMAT, values=st.lists(FINITE, min_size=1, max_size=30), nonfinite=st.sampled_from(Nonfinite))
def test_the_policy_for_infinities_does_not_touch_finite_values(fmt, values, nonfinite):
    x = torch.tensor(values)
    codes = cast_nearest(x, fmt).view(torch.uint8)
    assert torch.equal(cast_nearest(x, fmt, nonfinite=nonfinite).view(torch.uint8), codes)


@given(fmt=FORMAT, values=st.lists(FINITE, min_size=1, max_size=30), seed=st.integers(0, 2**32))
def test_stochastic_rounding_is_less_than_one_step_away(fmt, values, seed):
    x = torch.tensor(values)
    got = cast_stochastic(x, fmt, generator=torch.Generator().manual_seed(seed)).float()
    inside = x.clamp(-fmt.max, fmt.max)
    steps = torch.tensor([2 * half_step(value, fmt) for value in inside.tolist()])
    assert ((got - inside).abs() < steps).all()
    assert (got * inside >= 0).all()


@pytest.mark.parametrize("fmt", FP8_FORMATS, ids=str)
@given(data=st.data())
def test_a_power_of_two_scale_shifts_the_exponent_only(fmt, data):
    """Multiplying by 2^k before equals dividing the rounded value by 2^k after, as long as nothing is subnormal."""
    value = data.draw(st.floats(fmt.min_normal, fmt.max / 4, width=32))
    shift = data.draw(st.integers(0, 2))
    scaled = cast_nearest(torch.tensor(value), fmt, torch.tensor(2.0**shift)).float().item()
    assert scaled == rounded([value], fmt).item() * 2.0**shift

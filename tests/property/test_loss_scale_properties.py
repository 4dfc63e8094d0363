"""A power of two in front of the loss: dynamic FP8 sees the same codes, and its scales move by exactly that much."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import octavo
from octavo import recipes
from octavo.functional import cast_operand

DYNAMIC = ("tensorwise", "rowwise", "blockwise", "mxfp8")
EXPONENTS = st.integers(-60, 60)
SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


@st.composite
def gradients(draw):
    """Up to 3 x 140, so that blocks of 32 and 128 have a tail; zeros among values over 2^±12."""
    rows, columns = draw(st.integers(1, 3)), draw(st.sampled_from((1, 5, 32, 33, 140)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.integers(0, 12))
    values = torch.randn(rows, columns, generator=generator)
    powers = torch.randint(-spread, spread + 1, values.shape, generator=generator)
    kept = torch.rand(values.shape, generator=generator) > draw(st.sampled_from((0.0, 0.5)))
    return values.ldexp(powers) * kept


def stays_in_range(x, exponent):
    """Neither the elements nor the scales made from them leave FP32's normal numbers."""
    magnitudes = x[x != 0].abs().double() * 2.0**exponent
    return bool(((magnitudes > SMALLEST * 2.0**17) & (magnitudes < LARGEST)).all())


@pytest.mark.parametrize("name", DYNAMIC)
@given(x=gradients(), exponent=EXPONENTS)
def test_codes_stay_and_scales_shift(name, x, exponent):
    assume(stays_in_range(x, 0))
    assume(stays_in_range(x, exponent))
    recipe = recipes.get(name)
    for matrix, cast in ((x, recipe.grad_input.a), (x.t(), recipe.grad_weight.a)):
        plain, scaled = cast_operand(matrix, cast), cast_operand(matrix * 2.0**exponent, cast)
        assert torch.equal(plain.data.view(torch.uint8), scaled.data.view(torch.uint8))
        empty = _amax(plain) == 0
        shifted = torch.ldexp(_scale(plain), torch.tensor(exponent))
        assert torch.equal(_scale(scaled)[~empty], shifted[~empty])


def _scale(q):
    if q.scale.dtype is torch.uint8:  # E8M0
        return torch.ldexp(torch.ones(q.scale.shape), q.scale.int() - 127)
    return q.scale


def _amax(q):
    return q.granularity.reduce_max(q.data.float().abs())


@pytest.mark.parametrize("name", DYNAMIC)
@given(exponent=st.integers(-16, 16))
def test_gradients_of_a_scaled_loss_are_scaled_gradients(name, exponent):
    generator = torch.Generator().manual_seed(1)
    x, up = (torch.randn(5, 40, generator=generator) for _ in range(2))
    layer = octavo.nn.Linear(40, 40, recipe=name)
    nn.init.normal_(layer.weight, generator=generator)
    leaf = x.clone().requires_grad_()
    tensors = leaf, layer.weight, layer.bias
    plain = torch.autograd.grad((layer(leaf) * up).sum(), tensors)
    scaled = torch.autograd.grad((layer(leaf) * up).sum() * 2.0**exponent, tensors)
    for one, other in zip(plain, scaled, strict=True):
        assert torch.equal(one * 2.0**exponent, other)


def test_a_factor_that_is_no_power_of_two_changes_codes():
    """The law's premise: with any other factor the products round elsewhere."""
    x = torch.randn(64, 64) * math.pi
    cast = recipes.get("rowwise").grad_input.a
    codes = (cast_operand(y, cast).data.view(torch.uint8) for y in (x, x * 1.1))
    assert not torch.equal(*codes)

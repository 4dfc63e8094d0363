"""Laws of quantize for any tensor: invariances, independence of groups, and stability at a fixed scale."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from octavo.formats import E4M3, E5M2, FP8_FORMATS
from octavo.numerics import PerBlock, PerRow, PerTensor, QuantizedTensor, ScaleRounding, quantize

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
GRANULARITIES = (PerTensor(), PerRow(), PerBlock(2, 2), PerBlock(1, 3))
FORMAT = st.sampled_from(FP8_FORMATS)
GRANULARITY = st.sampled_from(GRANULARITIES)
ROUNDING = st.sampled_from(ScaleRounding)
NEVER_OVER = st.sampled_from((ScaleRounding.FP32, ScaleRounding.RCEIL))  # the two that no value passes


@st.composite
def matrices(draw, magnitude=30, min_rows=1):
    """Up to 5 x 6, every dtype, magnitudes over 2^±magnitude, zeros among them."""
    rows, columns = draw(st.integers(min_rows, 5)), draw(st.integers(1, 6))
    mantissas = st.integers(-(2**24), 2**24).map(lambda integer: integer / 2**23)
    count = rows * columns
    values = draw(st.lists(mantissas, min_size=count, max_size=count))
    exponents = draw(st.lists(st.integers(-magnitude, magnitude), min_size=count, max_size=count))
    x = torch.tensor([math.ldexp(m, e) for m, e in zip(values, exponents, strict=True)]).reshape(rows, columns)
    dtype = draw(st.sampled_from(DTYPES))
    return x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


def same(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    return torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8)) and torch.equal(a.scale, b.scale)


@pytest.mark.long
@given(x=matrices(), fmt=FORMAT, granularity=GRANULARITY, scale_rounding=ROUNDING)
def test_requantizing_at_the_same_scale_returns_the_same_codes(x, fmt, granularity, scale_rounding):
    q = quantize(x, fmt, granularity=granularity, scale_rounding=scale_rounding)
    decoded = q.dequantize()
    assume(decoded.isfinite().all())  # float16: its largest values may round up beyond its range
    assert same(quantize(decoded, fmt, granularity=granularity, scale=q.scale), q)


@given(x=matrices(10), fmt=FORMAT, granularity=GRANULARITY, scale_rounding=ROUNDING, shift=st.integers(-40, 40))
def test_powers_of_two_change_the_scale_and_no_code(x, fmt, granularity, scale_rounding, shift):
    """Why loss scaling does nothing for dynamically scaled gradients."""
    x = x.float()
    q, shifted = (
        quantize(v, fmt, granularity=granularity, scale_rounding=scale_rounding, amax_floor=0.0)
        for v in (x, x * 2.0**shift)
    )
    assert torch.equal(shifted.data.view(torch.uint8), q.data.view(torch.uint8))
    empty = q.granularity.reduce_max(x.abs()) == 0
    assert torch.equal(shifted.scale[~empty], q.scale[~empty] * 2.0**shift)


@given(x=matrices(), fmt=FORMAT, seed=st.integers(0, 1000))
def test_order_of_elements_does_not_matter(x, fmt, seed):
    order = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(seed))
    q, permuted = quantize(x.flatten(), fmt), quantize(x.flatten()[order], fmt)
    assert torch.equal(permuted.data.view(torch.uint8), q.data.view(torch.uint8)[order])
    assert torch.equal(permuted.scale, q.scale)


@given(x=matrices(), fmt=FORMAT, scale_rounding=ROUNDING)
def test_per_row_is_per_tensor_of_each_row(x, fmt, scale_rounding):
    q = quantize(x, fmt, granularity=PerRow(), scale_rounding=scale_rounding)
    for index, row in enumerate(x):
        alone = quantize(row, fmt, scale_rounding=scale_rounding)
        assert torch.equal(q.data[index].view(torch.uint8), alone.data.view(torch.uint8))
        assert torch.equal(q.scale[index, 0], alone.scale)


@pytest.mark.long
@given(x=matrices(), fmt=FORMAT)
def test_one_block_is_per_tensor_and_one_row_blocks_are_per_row(x, fmt):
    rows, columns = x.shape
    whole, row_blocks = PerBlock(rows, columns), PerBlock(1, columns)
    per_tensor = quantize(x, fmt)
    block = quantize(x, fmt, granularity=whole)
    assert torch.equal(block.data.view(torch.uint8), per_tensor.data.view(torch.uint8))
    assert block.scale.item() == per_tensor.scale.item()
    assert same(quantize(x, fmt, granularity=row_blocks), quantize(x, fmt, granularity=PerRow()))


@given(x=matrices(min_rows=3), granularity=st.sampled_from(GRANULARITIES[1:]), fmt=FORMAT)
def test_a_change_in_one_row_pair_leaves_the_other_groups_alone(x, granularity, fmt):
    changed = x.clone()
    changed[:2] = 1.0
    before, after = (quantize(v, fmt, granularity=granularity) for v in (x, changed))
    assert torch.equal(before.data[2:].view(torch.uint8), after.data[2:].view(torch.uint8))


@given(x=matrices(), fmt=FORMAT, granularity=GRANULARITY)
def test_sign_symmetry(x, fmt, granularity):
    positive, negative = (quantize(v, fmt, granularity=granularity) for v in (x, -x))
    assert torch.equal(positive.scale, negative.scale)
    assert torch.equal(positive.data.float(), -negative.data.float())


@given(x=matrices(12), fmt=st.sampled_from((E4M3, E5M2)), granularity=GRANULARITY, scale_rounding=NEVER_OVER)
def test_error_is_bounded_by_the_format_and_the_scale(x, fmt, granularity, scale_rounding):
    """Half a step of the value, or half the smallest step times the scale; plus float32's own roundings."""
    x = x.float()
    q = quantize(x, fmt, granularity=granularity, scale_rounding=scale_rounding)
    scale = granularity.expand(q.scale, x.shape).broadcast_to(x.shape).double()
    smallest = fmt.magnitude(1) * scale
    bound = torch.maximum(x.double().abs() * fmt.epsilon, smallest) / 2
    assert ((q.dequantize().double() - x.double()).abs() <= bound * (1 + 2.0**-12)).all()


@given(x=matrices(), fmt=FORMAT, granularity=GRANULARITY, scale_rounding=NEVER_OVER)
def test_values_do_not_saturate_under_their_own_scale(x, fmt, granularity, scale_rounding):
    q = quantize(x, fmt, granularity=granularity, scale_rounding=scale_rounding)
    scaled = x.double() / granularity.expand(q.scale, x.shape).double()
    assert (scaled.abs() <= fmt.max * (1 + 2.0**-22)).all()
    assert q.data.float().isfinite().all()

"""The native casts against octavo.numerics, bit for bit: every level, dtype, format, layout, granularity and rule."""

import itertools
import math
from typing import Any

import pytest
import torch

import octavo
from octavo.formats import E4M3, E5M2
from octavo.kernels import CastResult, native_bindings
from octavo.numerics import (
    CastSpec,
    Nonfinite,
    PerBlock,
    PerRow,
    PerTensor,
    QuantizedTensor,
    ScaleRounding,
    measure,
    quantize,
)
from octavo.numerics.granularity import granularity_as_list
from octavo.numerics.quantized import dequantize_by_torch
from octavo.numerics.scaling import AMAX_FLOOR

FORMATS = (E4M3, E5M2)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GRANULARITIES = (
    PerTensor(), PerRow(), PerBlock(1, 128), PerBlock(128, 128), PerBlock(1, 32), PerBlock(32, 1), PerBlock(128, 1),
    PerBlock(3, 7), PerBlock(1000, 1),
)  # fmt: skip
RULE: dict[str, Any] = {"scale_rounding": ScaleRounding.FP32, "amax_floor": AMAX_FLOOR, "margin": 0}
needs_extension = pytest.mark.skipif(
    bool(native_bindings.why_absent()), reason=f"no native kernels: {native_bindings.why_absent()}"
)
pytestmark = needs_extension


def assert_same_cast(x, fmt, granularity, rule=RULE, *, nonfinite=Nonfinite.PROPAGATE, **given):
    """Codes (a NaN is a NaN), scales, amaxes and the count of what is not finite, at every level of this machine."""
    wanted = quantize(x, fmt, granularity=granularity, nonfinite=nonfinite, **rule, **given)
    found = measure(x, granularity)
    for level in native_bindings.levels():
        cast = native_bindings.cast(
            x, CastSpec(format=fmt, granularity=granularity, **rule, nonfinite=nonfinite), **given, level=level
        )
        assert_same_codes(cast.output.data, wanted.data, level)
        assert torch.equal(cast.output.scale, wanted.scale), level
        assert cast.measurement is not None
        assert torch.equal(cast.measurement.amax, found.amax), level
        assert nonfinite_count(cast) == (~x.isfinite()).sum(), level


def nonfinite_count(result: CastResult) -> int:
    assert result.measurement is not None
    return int(result.measurement.nonfinite or 0)


def assert_same_codes(codes, wanted, note):
    assert (codes.dtype, codes.shape) == (wanted.dtype, wanted.shape)
    is_nan = wanted.float().isnan()
    assert torch.equal(codes.float().isnan(), is_nan), note
    assert torch.equal(codes.view(torch.uint8)[~is_nan], wanted.view(torch.uint8)[~is_nan]), note


def numbers(*shape, dtype=torch.float32):
    """Nine decades, some zeros, one outlier."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator) * 10 ** torch.empty(shape).uniform_(-6, 3, generator=generator)
    x[torch.rand(shape, generator=generator) < 0.05] = 0
    return x.to(dtype)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 3.7e-3, 2.0**-9, 2.0**8])
def test_every_16_bit_input(fmt, dtype, scale):
    x = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)
    for policy in Nonfinite:
        assert_same_cast(x, fmt, PerTensor(), nonfinite=policy, scale=torch.tensor(scale))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_finite_16_bit_input_at_any_scale(fmt, dtype):
    x = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)
    x = x[x.isfinite()]
    for scale in scales():
        assert_same_cast(x, fmt, PerTensor(), scale=scale)


def scales():
    """The smallest and the largest, powers of two and numbers that are none, from all over the range."""
    info = torch.finfo(torch.float32)
    drawn = 2.0 ** torch.linspace(-126, 127, 24) * (1 + torch.rand(24, generator=torch.Generator().manual_seed(0)))
    fixed = torch.tensor([2.0**-149, info.tiny, 2.0**-100, 2.0**-9, 1.0, 2.0**9, 2.0**100, info.max])
    around = torch.tensor([2.0**-100, 2.0**100])
    beside = torch.cat([around.nextafter(torch.tensor(0.0)), around.nextafter(torch.tensor(math.inf))])
    return torch.cat([drawn.clamp(max=info.max), fixed, beside])


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_every_midpoint_and_its_neighbours(fmt):
    codes = torch.arange(256, dtype=torch.uint8).view(fmt.torch_dtype).float()
    values = codes[codes.isfinite()].sort().values
    middles = torch.cat([(values[1:] + values[:-1]) / 2, torch.tensor([fmt.max * 1.0625, 3e38, 2.0**-149, 2.0**-126])])
    x = torch.cat([values, middles, -middles])
    x = torch.cat([x, x.nextafter(torch.tensor(math.inf)), x.nextafter(torch.tensor(-math.inf))])
    assert_same_cast(x, fmt, PerTensor(), scale=torch.tensor(1.0))


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (7, 33), (130, 261)], ids=str)
def test_every_granularity_and_rule(granularity, dtype, shape):
    x = numbers(*shape, dtype=dtype)
    for fmt, rounding, margin in itertools.product(FORMATS, ScaleRounding, (0, 2)):
        assert_same_cast(x, fmt, granularity, {"scale_rounding": rounding, "amax_floor": 0.0, "margin": margin})


LAYOUTS = {
    "transposed": lambda x: x.t().contiguous().t(),
    "part of a matrix": lambda x: x.repeat(1, 4)[:, 3 : 3 + x.shape[1]],
    "part of a transposed one": lambda x: x.repeat(6, 1).t().contiguous().t()[5 : 5 + x.shape[0]],
    "every second column": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "one row again and again": lambda x: x[:1].expand(x.shape),
    "one element again and again": lambda x: x[:1, :1].expand(x.shape),
    "misaligned": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].reshape(x.shape),
}


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(granularity, layout):
    for shape in ((1, 40), (40, 1), (70, 290)):
        for dtype in (torch.float32, torch.bfloat16):
            x = LAYOUTS[layout](numbers(*shape, dtype=dtype))
            before = x.clone()
            assert_same_cast(x, E4M3, granularity)
            assert torch.equal(x, before), "the input was written to"


def test_more_dimensions():
    x = numbers(3, 5, 70)
    for view in (x, x.transpose(0, 1), x.permute(2, 0, 1), x[:, :, ::3]):
        for granularity in (PerTensor(), PerRow()):
            assert_same_cast(view, E5M2, granularity)
    for granularity in (PerTensor(), PerRow()):
        assert_same_cast(numbers(50), E4M3, granularity)
    assert_same_cast(numbers(1, 1).reshape(()), E4M3, PerTensor())
    assert_same_cast(numbers(9, 30).double(), E4M3, PerRow())


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nonfinite_elements_do_not_affect_the_scale(granularity, dtype):
    x = numbers(140, 270, dtype=dtype)
    x[3, 5], x[3, 200], x[100, 5], x[:, 77], x[139] = math.nan, math.inf, -math.inf, math.nan, math.inf
    for view, fmt, policy in itertools.product((x, x.t()), FORMATS, Nonfinite):
        assert_same_cast(view, fmt, granularity, nonfinite=policy)
    assert_same_cast(torch.full_like(x, math.nan), E4M3, granularity)
    assert_same_cast(torch.zeros_like(x), E4M3, granularity)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_magnitudes_at_both_ends(granularity):
    info = torch.finfo(torch.float32)
    for value in (info.max, info.tiny, 2.0**-149, 2.0**-140, 6.6e-37, 1e-30, 448.0, 449.0, 2.0**-127 * 448):
        for rounding, fmt, margin in itertools.product(ScaleRounding, FORMATS, (0, 9)):
            x = numbers(9, 40).clamp(-1, 1) * value
            x[2, 3] = value
            assert_same_cast(
                x, fmt, granularity, {"scale_rounding": rounding, "amax_floor": AMAX_FLOOR, "margin": margin}
            )
            assert_same_cast(
                x.bfloat16(), fmt, granularity, {"scale_rounding": rounding, "amax_floor": AMAX_FLOOR, "margin": margin}
            )


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_given_amaxes_and_scales(granularity):
    x = numbers(66, 140)
    shape = granularity.scale_shape(x.shape)
    for given in (torch.rand(shape) * 10, torch.zeros(shape), torch.full(shape, 1e-30)):
        assert_same_cast(x, E4M3, granularity, amax=given)
        assert_same_cast(
            x.t().contiguous().t(),
            E5M2,
            granularity,
            {"scale_rounding": ScaleRounding.RCEIL, "amax_floor": 0.0, "margin": 1},
            amax=given,
        )
    assert_same_cast(x, E4M3, granularity, scale=torch.rand(shape) + 1e-3)
    assert_same_cast(x, E4M3, granularity, scale=torch.full(shape, 1e-39))


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_a_group_without_an_amax_provides_for_its_own(granularity):
    x = numbers(66, 140)
    own = measure(x, granularity).amax
    given = torch.where(torch.rand(own.shape) < 0.5, 0.0, own * 3)
    wanted = quantize(x, E4M3, granularity=granularity, amax=torch.where(given > 0, given, own))
    for level in native_bindings.levels():
        cast = native_bindings.cast(
            x, CastSpec(format=E4M3, granularity=granularity, **RULE), amax=given, measure_if_zero=True, level=level
        )
        assert_same_codes(cast.output.data, wanted.data, level)
        assert cast.measurement is not None
        assert torch.equal(cast.measurement.amax, own)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_counts(granularity, fmt):
    x = numbers(60, 100)
    x[0, 0], x[5, 5] = math.inf, math.nan
    amax = measure(x, granularity).amax / 4
    scaled = x * granularity.expand(fmt.max / amax, x.shape)
    for level in native_bindings.levels():
        cast = native_bindings.cast(
            x, CastSpec(format=fmt, granularity=granularity, **RULE), amax=amax, counting=True, level=level
        )
        assert_same_codes(cast.output.data, quantize(x, fmt, granularity=granularity, amax=amax).data, level)
        finite = x.isfinite()
        assert nonfinite_count(cast) == 2
        assert cast.saturated == (finite & (scaled.abs() > fmt.max)).sum()
        assert cast.underflowed == (finite & (x != 0) & (cast.output.data.float() == 0)).sum()
        assert cast.underflowed > 0
        assert cast.saturated > 0


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_dequantize(fmt, dtype, granularity):
    codes = torch.arange(256, dtype=torch.uint8).repeat(30)[: 21 * 261].reshape(21, 261).view(fmt.torch_dtype)
    for exponent in (-140, -20, 0, 100):
        for view in (codes, codes.view(torch.uint8).t().contiguous().t().view(fmt.torch_dtype), codes[:, 4:200]):
            scale = torch.rand(granularity.scale_shape(view.shape)) * 2.0 ** (exponent // 2) * 2.0 ** (exponent // 2)
            wanted = QuantizedTensor(view, scale, granularity, dtype).dequantize()
            for level in native_bindings.levels():
                found = native_bindings.dequantize(view, scale, granularity, dtype, level=level)
                torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
                out = torch.full(view.shape, 7.0, dtype=dtype)
                assert native_bindings.dequantize(view, scale, granularity, dtype, out=out, level=level) is out
                torch.testing.assert_close(out, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantize_finite_codes(fmt, dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(fmt.torch_dtype)
    finite = codes.view(torch.uint8)[codes.float().isfinite()].repeat(3)
    for scale in [*scales(), torch.tensor(0.0), torch.tensor(-1.5), torch.tensor(math.inf), torch.tensor(math.nan)]:
        for special in (False, True):
            given = finite.clone()
            given[37 if special else 0] = 0x7F if special else 1
            assert_same_numbers(given.view(fmt.torch_dtype), scale, PerTensor(), dtype)
    rows = torch.stack([finite.roll(i) for i in range(len(scales()))]).view(fmt.torch_dtype)
    for columns in (1, 31, 63, 64, 65, 95, 128, 256, 700):
        assert_same_numbers(rows[:, :columns], scales()[:, None], PerRow(), dtype)
    blocks = PerBlock(1, 64)
    assert_same_numbers(rows, scales()[:, None].expand(blocks.scale_shape(rows.shape)), blocks, dtype)


def assert_same_numbers(codes, scale, granularity, dtype):
    """Decoded by every level, and by the formula; a zero's sign and a NaN's place count, a NaN's sign does not."""
    wanted = dequantize_by_torch(codes, scale, granularity_as_list(granularity), dtype)
    for level in native_bindings.levels():
        found = native_bindings.dequantize(codes, scale, granularity, dtype, level=level)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(found.signbit() | found.isnan(), wanted.signbit() | wanted.isnan()), level


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_codes_go_where_they_are_wanted(granularity):
    x = numbers(60, 100)
    for view in (x, x.t().contiguous().t(), x[:, 3:90], x[:, :1], x[0, 0]):
        if view.ndim == 0 and not isinstance(granularity, PerTensor):
            continue
        wanted = quantize(view, E4M3, granularity=granularity)
        for level in native_bindings.levels():
            out = (
                torch.full((view.numel(),), 7.0)
                .to(E4M3.torch_dtype)
                .as_strided(view.shape, native_bindings.codes_strides(view))
            )
            cast = native_bindings.cast(
                view, CastSpec(format=E4M3, granularity=granularity, **RULE), out=out, level=level
            )
            assert cast.output.data.data_ptr() == out.data_ptr(), level
            assert_same_codes(out, wanted.data, level)
            assert_same_codes(cast.output.data, wanted.data, level)
            assert torch.equal(cast.output.scale, wanted.scale), level


@pytest.mark.long
def test_threads_change_nothing():
    x = numbers(300, 1001)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            for granularity in GRANULARITIES:
                assert_same_cast(x, E4M3, granularity)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(2, 3, 31), (4, 128, 256), (2, 200, 300), (3, 130, 130), (2, 2, 256, 5)])
@pytest.mark.parametrize("granularity", [PerBlock(1, 32), PerBlock(128, 128), PerBlock(2, 7)], ids=str)
def test_blocks_do_not_reach_from_one_matrix_into_the_next(shape, granularity):
    x = torch.randn(shape)
    x[0] *= 1000
    whole = octavo.quantize(x, E4M3, granularity=granularity)
    flat = x.reshape(-1, *shape[-2:])
    one_by_one = [octavo.quantize(matrix, E4M3, granularity=granularity) for matrix in flat]
    for name in ("data", "scale"):
        parts = torch.stack([getattr(own, name).view(torch.uint8) for own in one_by_one])
        assert torch.equal(getattr(whole, name).view(torch.uint8).reshape(parts.shape), parts)
    decoded = torch.stack([own.dequantize() for own in one_by_one]).reshape(shape)
    assert torch.equal(whole.dequantize(), decoded)
    assert torch.equal(octavo.fake_quantize(x, E4M3, granularity=granularity), decoded)


@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerBlock(3, 40)], ids=str)
def test_saturation_and_underflow_are_counted(granularity):
    x = torch.randn(9, 100) * 10.0 ** torch.randint(-6, 5, (9, 100))
    x[0, :3] = torch.tensor([math.nan, math.inf, 0.0])
    x[1, :2] = torch.tensor([448.0, 464.0])
    scale = torch.ones(granularity.scale_shape(x.shape))
    finite = x.isfinite()
    for level in native_bindings.levels():
        found = native_bindings.cast(
            x, CastSpec(format=E4M3, granularity=granularity, **RULE), scale=scale, counting=True, level=level
        )
        assert nonfinite_count(found) == int((~finite).sum())
        assert found.saturated == int((finite & (x.abs() > 448.0)).sum())
        zero = (found.output.data.view(torch.uint8) & 0x7F) == 0
        assert found.underflowed == int((finite & (x != 0) & zero).sum())

"""Amax and scale bit for bit: against fractions, numpy and torchao, at every row of the module's table."""

import math

import numpy as np
import pytest
import torch

from octavo.errors import ConfigError
from octavo.formats import E4M3, E5M2, E8M0, FP8_FORMATS
from octavo.numerics import PerBlock, PerRow, PerTensor, amax, encode_scale_from_amax, scale_from_amax
from octavo.numerics.cast import cast_nearest
from octavo.numerics.quantized import quantize
from octavo.numerics.scaling import (
    ScaleRounding,
    e8m0_from_scale,
    power_of_two_floor,
    scale_from_e8m0,
    smallest_scaled_amax,
)
from tests.oracle.scale_formula import FLOAT32_MAX, FLOAT32_MIN_NORMAL, bits, decode_scale, encode_scale

ROUNDINGS = list(ScaleRounding)
every_format = pytest.mark.parametrize("fmt", FP8_FORMATS, ids=str)
every_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)

EDGES = [0.0, 1e-45, 1e-38, 1e-30, 1e-12, 9.9e-13, 1.1e-12, 1.0, 448.0, 57344.0, 1e30, FLOAT32_MAX]


def amaxes(count=1500):
    """Float32 magnitudes with random bits, so that every binade has some, and the edges."""
    random = np.random.default_rng(0).integers(0, 0x7F80_0000, count, dtype=np.uint32).view(np.float32)
    return torch.from_numpy(np.concatenate([np.array(EDGES, np.float32), random]))


def bits_of(x):
    return x.view(torch.int32).tolist()


@every_format
@pytest.mark.parametrize("scale_rounding", ROUNDINGS)
@pytest.mark.parametrize(("amax_floor", "margin"), [(0.0, 0), (1e-12, 0), (0.0, 3), (0.0, 40), (1.0, 60)])
def test_formula_in_fractions(fmt, scale_rounding, amax_floor, margin):
    options = {"rounding": scale_rounding, "amax_floor": amax_floor, "margin": margin}
    measured = amaxes()
    encode = [encode_scale(value, fmt.max, **options) for value in measured.tolist()]
    assert bits_of(encode_scale_from_amax(measured, fmt, **options)) == [bits(value) for value in encode]
    decode = [bits(decode_scale(value)) for value in encode]
    assert bits_of(scale_from_amax(measured, fmt, **options)) == decode


@every_format
def test_formula_in_numpy(fmt):
    measured = amaxes()
    with np.errstate(divide="ignore"):
        quotient = fmt.max / measured.numpy().astype(np.float64)
    encode = np.minimum(quotient, FLOAT32_MAX).astype(np.float32)
    assert np.array_equal(encode_scale_from_amax(measured, fmt).numpy(), encode)
    assert np.array_equal(scale_from_amax(measured, fmt).numpy(), np.float32(1) / encode)


@every_format
@pytest.mark.parametrize("margin", [0, 1, 12, 126, 300, 2000])
@pytest.mark.parametrize("scale_rounding", ROUNDINGS)
def test_both_scales_are_finite_and_positive(fmt, margin, scale_rounding):
    measured = amaxes()
    options = {"rounding": scale_rounding, "amax_floor": 0.0, "margin": margin}
    for scales in (encode_scale_from_amax(measured, fmt, **options), scale_from_amax(measured, fmt, **options)):
        assert scales.isfinite().all()
        assert (scales > 0).all()


@every_format
def test_table_of_special_amaxes(fmt):
    def one(value, **options):
        return encode_scale_from_amax(torch.tensor(value), fmt, **options).item()

    assert one(0.0) == one(1e-40) == one(6e-37) == one(3e-37, margin=1) == FLOAT32_MAX
    assert one(0.0, amax_floor=1e-12) == one(1e-20, amax_floor=1e-12) == one(1e-12)
    assert one(FLOAT32_MAX, margin=200) == FLOAT32_MIN_NORMAL
    assert one(1.0, margin=4) == one(1.0) / 16


@every_format
def test_the_smallest_scaled_amax_is_where_the_quotient_becomes_finite(fmt):
    edge = np.float32(smallest_scaled_amax(fmt))  # rounded to nearest
    below, above = np.nextafter(edge, np.float32(0)), np.nextafter(edge, np.float32(1))
    encode = encode_scale_from_amax(torch.from_numpy(np.array([below, above])), fmt)
    assert encode[0] == FLOAT32_MAX
    assert encode[1] < FLOAT32_MAX
    assert cast_nearest(torch.tensor(float(above)), fmt, encode[1]).float() == fmt.max
    assert smallest_scaled_amax(fmt, 1e-12) == 1e-12


@every_dtype
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_the_largest_values_survive(fmt, dtype):
    x = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min, 0.0], dtype=dtype)
    assert torch.equal(quantize(x, fmt).dequantize(), x)


@every_format
def test_amax_lands_on_the_maximum(fmt):
    measured = amaxes()
    measured = measured[(measured > 1e-12) & (measured < 1e38)]
    codes = cast_nearest(measured, fmt, encode_scale_from_amax(measured, fmt))
    assert codes.view(torch.uint8).unique().tolist() == [fmt.max_code]


@every_format
def test_margin_leaves_binades_free(fmt):
    measured = amaxes()
    measured = measured[(measured > 1e-12) & (measured < 1e20)]
    plain, free = (encode_scale_from_amax(measured, fmt, margin=margin) for margin in (0, 5))
    assert torch.equal(free * 32, plain)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_torchao_computes_the_same_scales(fmt):
    float8_utils = pytest.importorskip("torchao.float8.float8_utils", reason="torchao, the peer, is not installed")
    measured = amaxes()
    theirs = float8_utils.amax_to_scale(measured, fmt.torch_dtype)
    assert bits_of(theirs) == bits_of(encode_scale_from_amax(measured, fmt, amax_floor=1e-12))
    above = measured >= 1e-12  # their EPS: from here on the floor is nothing to either
    assert bits_of(theirs[above]) == bits_of(encode_scale_from_amax(measured[above], fmt))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.randn(33, 65).mul(torch.rand(33, 1) * 50).to(dtype)
        ours = encode_scale_from_amax(amax(x), fmt)
        assert bits_of(float8_utils.tensor_to_scale(x, fmt.torch_dtype)) == bits_of(ours)
        axiswise = float8_utils.ScalingGranularity.AXISWISE
        theirs = float8_utils.tensor_to_scale(x, fmt.torch_dtype, scaling_granularity=axiswise, axiswise_dim=-1)
        assert bits_of(theirs) == bits_of(encode_scale_from_amax(amax(x, PerRow()), fmt))


def powers_of_two():
    return torch.tensor([math.ldexp(1.0, exponent) for exponent in range(-126, 128)])


def test_power_of_two_floor_at_and_beside_every_power():
    powers = powers_of_two()
    infinity = torch.tensor(math.inf)
    assert torch.equal(power_of_two_floor(powers), powers)
    assert torch.equal(power_of_two_floor(torch.nextafter(powers, infinity)), powers)
    below = torch.nextafter(powers[1:], -infinity)  # below 2^-126 lie subnormals
    assert torch.equal(power_of_two_floor(below), powers[:-1])


def test_exp2_of_floor_of_log2_is_wrong_below_powers_of_two():
    """Why the mantissa bits are masked: the usual formula rounds such numbers up."""
    powers = powers_of_two()[1:]
    below = torch.nextafter(powers, torch.tensor(0.0))
    usual = torch.exp2(torch.floor(torch.log2(below)))
    ours = power_of_two_floor(below)
    assert (usual > ours).any()
    assert not (ours > below).any()


def test_power_of_two_floor_of_random_values():
    x = amaxes()
    x = x[x >= FLOAT32_MIN_NORMAL]
    assert power_of_two_floor(x).tolist() == [math.ldexp(0.5, math.frexp(value)[1]) for value in x.tolist()]


@every_dtype
@pytest.mark.parametrize(
    ("granularity", "rows", "columns"), [(PerTensor(), 5, 7), (PerRow(), 1, 7), (PerBlock(2, 3), 2, 3)], ids=str
)
def test_amax_is_exact_in_every_dtype(granularity, rows, columns, dtype):
    x = torch.randn(5, 7).mul(100).to(dtype)
    groups = [strip.split(columns, dim=1) for strip in x.double().split(rows)]
    expected = [[max(map(abs, group.flatten().tolist())) for group in strip] for strip in groups]
    measured = amax(x, granularity)
    assert measured.dtype is torch.float32
    assert measured.tolist() == (expected if measured.ndim else expected[0][0])


@every_dtype
@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerBlock(2, 3)], ids=str)
def test_amax_is_that_of_the_finite_elements(granularity, dtype):
    x = torch.randn(5, 7).to(dtype)
    bad = torch.zeros(5, 7, dtype=torch.bool)
    bad[0, 0] = bad[2, 3] = bad[4] = True
    poisoned = torch.where(bad, torch.tensor([math.inf, -math.inf, math.nan] * 2 + [math.inf]).to(dtype), x)
    without = torch.where(bad, 0, x)
    assert torch.equal(amax(poisoned, granularity), amax(without, granularity))


@pytest.mark.parametrize("value", [-3.0, 3.0, -0.0, 2.0**-149, -FLOAT32_MAX])
@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerBlock(2, 3)], ids=str)
def test_amax_of_one_element(granularity, value):
    measured = amax(torch.tensor([[value]]), granularity)
    assert measured.flatten().tolist() == [abs(value)]
    assert not measured.signbit().any()


def test_amax_of_nothing_is_zero():
    assert amax(torch.ones(0)).item() == 0
    assert amax(torch.full((4,), math.nan)).item() == 0
    assert torch.equal(amax(torch.ones(3, 0), PerRow()), torch.zeros(3, 1))


def test_amax_of_float64_is_taken_in_float32():
    x = torch.tensor([1 + 2.0**-30, -0.5, 1e300], dtype=torch.float64)
    assert amax(x).item() == 1.0
    assert amax(x[2:]).item() == 0.0


def test_amax_carries_no_gradient():
    assert not amax(torch.ones(3, requires_grad=True)).requires_grad


def test_dividing_by_amax_over_maximum_would_change_codes():
    """One order of operations, since the other one differs: in about one tensor of fifty here."""
    differing = 0
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(1024, generator=generator).mul(torch.rand((), generator=generator) * 10).bfloat16()
        other = cast_nearest(x.float() / (amax(x) / E4M3.max), E4M3)
        differing += not torch.equal(other.view(torch.uint8), quantize(x, E4M3).data.view(torch.uint8))
    assert 1 <= differing <= 20


@pytest.mark.parametrize("margin", [-1, -0.5])
def test_negative_margins_are_refused(margin):
    with pytest.raises(ConfigError, match=rf"margin must be 0 or more binades, not {margin}"):
        encode_scale_from_amax(torch.tensor(1.0), E4M3, margin=margin)


@pytest.mark.parametrize("amax_floor", [-1e-12, math.nan, math.inf])
def test_impossible_floors_are_refused(amax_floor):
    with pytest.raises(ConfigError, match=rf"amax_floor must be 0 or more and finite, not {amax_floor}"):
        encode_scale_from_amax(torch.tensor(1.0), E4M3, amax_floor=amax_floor)


def test_integers_have_no_amax():
    with pytest.raises(ConfigError, match=r"the tensor to measure must be a float16, .* not torch\.int64"):
        amax(torch.arange(3))


def _byte(amax: float, fmt, rounding: str) -> int:
    q = quantize(
        torch.tensor([[amax]]),
        fmt,
        granularity=PerBlock(1, 32),
        scale_rounding=ScaleRounding(rounding),
        scale_format=E8M0,
        amax_floor=0.0,
    )
    return int(q.scale)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_e8m0_bytes_at_and_beside_every_power_of_two_of_the_maximum(fmt):
    """rceil: maximum · 2^k is byte 127 + k, one ulp above it one more."""
    for k in range(-126 - 16, 128 - fmt.bias):
        amax = fmt.max * 2.0**k
        if amax < FLOAT32_MIN_NORMAL or amax >= FLOAT32_MAX:
            continue
        above, below = (np.nextafter(np.float32(amax), np.float32(to)).item() for to in (np.inf, 0))
        expected = [max(0, 127 + k), max(0, 128 + k), max(0, 127 + k)]
        assert [_byte(value, fmt, "rceil") for value in (amax, above, below)] == expected


@pytest.mark.parametrize(
    ("amax", "rceil", "floor", "even"),
    [
        (448.0, 127, 127, 127),
        (479.0, 128, 127, 127),
        (480.0, 128, 127, 127),  # 15/8 · 2^8 has three mantissa bits: nothing carries
        (496.0, 128, 127, 128),
        (512.0, 128, 128, 128),
        (0.0, 0, 0, 0),
        (2.0**-149, 0, 0, 0),
        (FLOAT32_MAX, 247, 246, 247),
    ],
)
def test_e8m0_bytes_of_the_three_rules(amax, rceil, floor, even):
    assert [_byte(amax, E4M3, rule) for rule in ("rceil", "floor", "even")] == [rceil, floor, even]


@pytest.mark.parametrize("compiling", [False, True])
def test_e8m0_bytes_decode_to_powers_of_two_and_one_nan(monkeypatch, compiling):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)  # another formula then
    codes = torch.arange(256, dtype=torch.uint8)
    powers = torch.tensor([2.0**exponent for exponent in range(-127, 128)])
    decoded = scale_from_e8m0(codes)
    assert torch.equal(decoded[:255], powers)
    assert decoded[255].isnan()
    assert torch.equal(e8m0_from_scale(powers), codes[:255])


@pytest.mark.parametrize(
    ("rounding", "scale", "largest"),
    [
        ("fp32", decode_scale(encode_scale(FLOAT32_MAX, 448.0)), 448.0),
        ("rceil", 2.0**120, 256.0),  # FLOAT32_MAX / 2^120 rounds to 256
        ("even", 2.0**120, 256.0),
        ("floor", 2.0**119, 448.0),  # 512, saturated
    ],
)
def test_a_block_at_float32s_maximum(rounding, scale, largest):
    x = (FLOAT32_MAX / torch.arange(1.0, 33)).view(1, 32)  # quotients on both sides of the middle of two codes
    q = quantize(x, E4M3, granularity=PerBlock(1, 32), scale_rounding=ScaleRounding(rounding))
    assert q.scale.item() == scale
    assert q.data.float()[0, 0].item() == largest
    decoded = q.data.double() * q.scale.double()
    unsaturated = slice(1 if rounding == "floor" else 0, None)
    error = (decoded - x.double()).abs()[0, unsaturated]
    assert (error <= x.double()[0, unsaturated] * E4M3.epsilon / 2).all()


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_where_subnormals_are_flushed_the_smallest_scale_is_float32s_smallest_normal(fmt):
    smallest = 2.0**-126 * fmt.max
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormal numbers")
    try:
        kept, lost = (quantize(torch.tensor([amax]), fmt) for amax in (smallest, smallest * 0.99))
        decoded = [each.dequantize().item() for each in (kept, lost)]
    finally:
        torch.set_flush_denormal(False)
    assert decoded == [torch.tensor(smallest).item(), 0.0]
    assert lost.scale.item() == 0

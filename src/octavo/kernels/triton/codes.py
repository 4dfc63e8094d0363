"""What every kernel does to single numbers: amax to encode scale, number to code, code to number.

The definitions stand in octavo.numerics; these are the same bits, but for the sign of a NaN code, which a CPU keeps and
these do not: in E4M3 -NaN is 0x7F here and 0xFF there. A GPU of compute capability 8.9 converts to FP8 in
hardware. Elsewhere, and in Triton's interpreter, whose own conversion drops bits instead of rounding, the conversion
is written out in integers: ``HARDWARE`` says which, and both give the same codes.

A kernel takes a format as three compile-time constants, ``MAX``, ``MANTISSA`` (its mantissa bits) and ``BIAS``, which
:func:`format_constants` names. ``MANTISSA`` tells the two formats apart: 3 is E4M3, 2 is E5M2.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from octavo.formats import Format

__all__ = [
    "code_from_number",
    "encode_scale_from_amax",
    "finite_magnitude",
    "format_constants",
    "has_hardware_casts",
    "is_infinite",
    "number_from_code",
    "number_from_scale",
    "reciprocal",
    "round_to",
]

INTERPRETED = triton.knobs.runtime.interpret
_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)

_FP32_TINY: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).tiny)
_FP32_MAX: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).max)
_NOTHING: tl.constexpr = tl.constexpr(2.0**-1000)  # instead of 0 / 0; small enough for the largest encode scale
_INFINITY_BITS: tl.constexpr = tl.constexpr(0x7F80_0000)
_MAGNITUDE_BITS: tl.constexpr = tl.constexpr(0x7FFF_FFFF)


def format_constants(fmt: Format) -> dict[str, Any]:
    """A format as the constants that kernels take.

    Example:
        >>> from octavo.formats import E4M3
        >>> format_constants(E4M3)
        {'MAX': 448.0, 'MANTISSA': 3, 'BIAS': 7}
    """
    return {"MAX": fmt.max, "MANTISSA": fmt.mantissa_bits, "BIAS": fmt.bias}


def has_hardware_casts(device: torch.device) -> bool:
    """Whether the device converts FP32 to FP8 itself."""
    return not INTERPRETED and _capability(device) >= (8, 9)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@triton.jit
def finite_magnitude(x):
    """|x| of FP32 numbers, 0 where it is NaN or ±Inf, and where that was: 1 or 0."""
    magnitude = x.to(tl.int32, bitcast=True) & _MAGNITUDE_BITS
    nonfinite = magnitude >= _INFINITY_BITS
    return tl.where(nonfinite, 0, magnitude).to(tl.float32, bitcast=True), nonfinite.to(tl.int32)


@triton.jit
def is_infinite(x):
    """Where FP32 numbers are ±Inf."""
    return (x.to(tl.int32, bitcast=True) & _MAGNITUDE_BITS) == _INFINITY_BITS


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """FP32 numbers in DTYPE, nearest, ties to even. The interpreter's bfloat16 cuts bits off, loses subnormals."""
    if _INTERPRETED and DTYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x1_0000
        nearest = tl.where((bits & _MAGNITUDE_BITS) > _INFINITY_BITS, bits | 0x40_0000, nearest)
        return (nearest >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def number_from_scale(held):
    """Scales as FP32 numbers; bytes are E8M0."""
    if held.dtype == tl.uint8:
        exponent = held.to(tl.int32)
        bits = tl.where(exponent == 0, 1 << 22, exponent << 23)  # 2^-127 is subnormal
        bits = tl.where(exponent == 255, 0x7FC0_0000, bits)
        held = bits.to(tl.float32, bitcast=True)
    return held


@triton.jit
def reciprocal(x):
    """1 / x in FP32, rounded to nearest."""
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def encode_scale_from_amax(
    amax,
    MAX: tl.constexpr,
    MANTISSA: tl.constexpr,
    ROUNDING: tl.constexpr,
    FLOOR: tl.constexpr,
    MARGIN: tl.constexpr,
):
    """numerics.scaling's function of finite FP32 amaxes; ROUNDING is a ScaleRounding's word."""
    lowest: tl.constexpr = max(_NOTHING, FLOOR)
    if (ROUNDING == "fp32" or ROUNDING == "rceil") and MARGIN <= 50:
        # Both operands are FP32 numbers, so one rounding of their quotient is what FP64's, rounded again, would be.
        # An amax below 1 takes a dividend 2^64 smaller: neither the quotient nor the dividend leaves FP32's range.
        dividend: tl.constexpr = MAX * 2.0**-MARGIN
        smallest = tl.full(amax.shape, 2.0**-149, tl.float32)
        large = amax >= 1.0
        quotient = tl.div_rn(tl.where(large, dividend, dividend * 2.0**-64), tl.maximum(amax, smallest))
        quotient = tl.where(large, quotient, tl.minimum(quotient, _FP32_MAX * 2.0**-64) * 2.0**64)
        of_lowest: tl.constexpr = max(min(dividend / lowest, _FP32_MAX), _FP32_TINY)
        # Below the floor are the FP32 numbers below the first that is not; a constant, which the compiler works out.
        exact = tl.full(amax.shape, lowest, tl.float64)
        first = exact.to(tl.float32)
        first = tl.where(
            first.to(tl.float64) < exact, first.to(tl.int32, bitcast=True) + 1, first.to(tl.int32, bitcast=True)
        )
        raised = amax < first.to(tl.float32, bitcast=True)
        encode = tl.where(raised, of_lowest, tl.maximum(quotient, _FP32_TINY))
        if ROUNDING == "rceil":
            encode = (encode.to(tl.int32, bitcast=True) & _INFINITY_BITS).to(tl.float32, bitcast=True)
        return encode
    largest = tl.maximum(amax.to(tl.float64), tl.full(amax.shape, lowest, tl.float64))
    if ROUNDING == "fp32" or ROUNDING == "rceil":
        quotient = tl.full(amax.shape, MAX * 2.0**-MARGIN, tl.float64) / largest
        quotient = tl.maximum(quotient, tl.full(amax.shape, _FP32_TINY, tl.float64))
        encode = tl.minimum(quotient, tl.full(amax.shape, _FP32_MAX, tl.float64)).to(tl.float32)
        if ROUNDING == "rceil":
            encode = (encode.to(tl.int32, bitcast=True) & _INFINITY_BITS).to(tl.float32, bitcast=True)
    else:
        bits = largest.to(tl.int64, bitcast=True)
        if ROUNDING == "even":  # what lies in the upper half of the last step carries
            bits += tl.full(amax.shape, 1 << (51 - MANTISSA), tl.int64)
        exponent = ((bits >> 52) - 1023).to(tl.int32)
        top: tl.constexpr = 8 if MANTISSA == 3 else 15  # floor(log2 maximum)
        encode = (tl.minimum(tl.maximum(top - MARGIN - exponent, -126), 127) + 127) << 23
        encode = encode.to(tl.float32, bitcast=True)
    return encode


@triton.jit
def code_from_number(
    scaled,
    MAX: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    PROPAGATE: tl.constexpr,
    HARDWARE: tl.constexpr,
    infinite=None,
):
    """FP32 numbers to uint8 codes: nearest, ties to even, saturating; NaN to NaN, 0x7F whatever its sign.

    ``infinite`` says which inputs were ±Inf before they were scaled; with PROPAGATE those become NaN (E4M3) or ±Inf
    (E5M2), else ±maximum. Without it nothing was.
    """
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude_bits = bits & _MAGNITUDE_BITS
    sign = ((bits >> 24) & 0x80).to(tl.uint8)
    if HARDWARE:  # cvt.rn.satfinite
        if MANTISSA == 3:
            codes = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            codes = scaled.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        limited = tl.where(magnitude_bits > _INFINITY_BITS, 0, magnitude_bits).to(tl.float32, bitcast=True)
        limited = tl.minimum(limited, MAX)
        whole = limited.to(tl.int32, bitcast=True)
        dropped: tl.constexpr = 23 - MANTISSA
        to_even = ((1 << (dropped - 1)) - 1) + ((whole >> dropped) & 1)
        normal = ((whole + to_even) >> dropped) - ((127 - BIAS) << MANTISSA)
        # Added to 2^23 times the smallest number, a subnormal is rounded by the addition itself.
        anchor: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
        anchor_bits: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
        subnormal = (limited + anchor).to(tl.int32, bitcast=True) - anchor_bits
        smallest_normal: tl.constexpr = 2.0 ** (1 - BIAS)
        codes = tl.where(limited < smallest_normal, subnormal, normal).to(tl.uint8) | sign
        codes = tl.where(magnitude_bits > _INFINITY_BITS, 0x7F, codes).to(tl.uint8)
    if PROPAGATE and infinite is not None:
        if MANTISSA == 3 and HARDWARE:  # which writes every NaN without a sign
            codes = tl.where(infinite, 0x7F, codes).to(tl.uint8)
        else:
            broken: tl.constexpr = 0x7F if MANTISSA == 3 else 0x7C
            codes = tl.where(infinite, broken | sign, codes).to(tl.uint8)
    return codes


@triton.jit
def number_from_code(codes, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr):
    """uint8 codes as FP32 numbers, NaN and ±Inf included."""
    if HARDWARE:
        if MANTISSA == 3:
            values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            values = codes.to(tl.float8e5, bitcast=True).to(tl.float32)
    else:
        wide = codes.to(tl.int32)
        shift: tl.constexpr = 23 - MANTISSA
        unshift: tl.constexpr = 2.0**120 if MANTISSA == 3 else 2.0**112  # 127 less the format's bias
        values = ((wide & 0x7F) << shift).to(tl.float32, bitcast=True) * unshift
        if MANTISSA == 3:
            values = tl.where((wide & 0x7F) == 0x7F, float("nan"), values)
        else:
            values = tl.where((wide & 0x7F) == 0x7C, float("inf"), values)
            values = tl.where((wide & 0x7F) > 0x7C, float("nan"), values)
        values = tl.where((wide & 0x80) != 0, -values, values)
    return values

"""Elementwise device functions that every kernel calls: amax to encode scale, number to code, code to number.

    encode = fp32(MAX · 2^-MARGIN / max(amax, FLOOR))        encode_scale_from_amax
    code   = RNE(fp32(x) · encode), saturated at ±MAX        code_from_number, of the product
    value  = (-1)^sign · 2^(exponent - BIAS) · 1.mantissa    number_from_code

octavo.numerics defines these functions; the results here are the same bits, except for the sign of a NaN code, which
octavo.numerics.cast leaves open. A GPU of compute capability 8.9 or more converts to FP8 in hardware. On other devices,
and in Triton's interpreter, whose own conversion truncates instead of rounding, the conversion is written in integer
arithmetic. ``HARDWARE`` selects one of the two. Both give the same codes except for the NaN of an E4M3 -Inf:

| input to E4M3   | hardware | integers | native CPU | octavo.numerics |
|-----------------|----------|----------|------------|-----------------|
| -NaN            | 0x7F     | 0x7F     | 0xFF       | 0xFF            |
| -Inf, PROPAGATE | 0x7F     | 0xFF     | 0xFF       | 0x7F            |

A kernel takes a format as three compile-time constants, ``MAX``, ``MANTISSA`` (number of mantissa bits) and ``BIAS``,
see :func:`format_constants`. ``MANTISSA`` tells the two formats apart: 3 is E4M3, 2 is E5M2.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from octavo.formats import Format

__all__ = [
    "LEAST_PER_WARP",
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

# Numbers that a tile has for each of its warps: a thread converts four at once. Triton fills up a tile with fewer, and
# does not compile one of fewer than four.
LEAST_PER_WARP = 4 * 32
INTERPRETED = triton.knobs.runtime.interpret
_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)

# Constants of float32's layout: 1 sign bit, 8 exponent bits from bit 23 on, 23 fraction bits. With the sign masked off,
# the bits of finite numbers, then infinity, then NaN are in ascending order as integers.
_FP32_TINY: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).tiny)
_FP32_MAX: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).max)
_NOTHING: tl.constexpr = tl.constexpr(2.0**-1000)  # instead of 0 / 0; small enough for the largest encode scale
_INFINITY_BITS: tl.constexpr = tl.constexpr(0x7F80_0000)
_MAGNITUDE_BITS: tl.constexpr = tl.constexpr(0x7FFF_FFFF)


def format_constants(fmt: Format) -> dict[str, Any]:
    """The compile-time arguments of a kernel that describe a format.

    Example:
        >>> from octavo.formats import E4M3
        >>> format_constants(E4M3)
        {'MAX': 448.0, 'MANTISSA': 3, 'BIAS': 7}
    """
    return {"MAX": fmt.max, "MANTISSA": fmt.mantissa_bits, "BIAS": fmt.bias}


def has_hardware_casts(device: torch.device) -> bool:
    """Return whether the device converts FP32 to FP8 in hardware."""
    return not INTERPRETED and _capability(device) >= (8, 9)  # Ada and Hopper are the first with cvt to e4m3x2, e5m2x2


@cache  # every cast asks
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@triton.jit
def finite_magnitude(x):
    """|x| of FP32 numbers with 0 in place of NaN and ±Inf, and an int32 flag of where those were."""
    # In integers: a float comparison with NaN is false both ways, and would need a second test for it.
    magnitude = x.to(tl.int32, bitcast=True) & _MAGNITUDE_BITS
    nonfinite = magnitude >= _INFINITY_BITS
    return tl.where(nonfinite, 0, magnitude).to(tl.float32, bitcast=True), nonfinite.to(tl.int32)


@triton.jit
def is_infinite(x):
    """Mask of the FP32 numbers that are ±Inf."""
    return (x.to(tl.int32, bitcast=True) & _MAGNITUDE_BITS) == _INFINITY_BITS


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """FP32 numbers rounded to DTYPE, to nearest, ties to even.

    The interpreter's conversion to bfloat16 truncates and loses subnormals, so it is written in integers there.
    """
    if _INTERPRETED and DTYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        # Add half of the kept last bit, less one where that bit is 0: ties go to even. A carry raises the exponent.
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x1_0000
        # NaN keeps its upper bits and turns quiet; the addition could carry it into infinity.
        nearest = tl.where((bits & _MAGNITUDE_BITS) > _INFINITY_BITS, bits | 0x40_0000, nearest)
        return (nearest >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def number_from_scale(scale):
    """Stored scales as FP32 numbers: float32 unchanged, a byte is E8M0, 2^(byte - 127)."""
    if scale.dtype == tl.uint8:  # decided while compiling: one kernel source serves both scale formats
        exponent = scale.to(tl.int32)
        # Both biases are 127, so the byte is the exponent field. Byte 0, 2^-127, is subnormal in FP32: fraction 0.5.
        bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
        bits = tl.where(exponent == 255, 0x7FC0_0000, bits)  # NaN; the shifted field alone would be infinity
        scale = bits.to(tl.float32, bitcast=True)
    return scale


@triton.jit
def reciprocal(x):
    """1 / x in FP32, rounded to nearest."""
    # Triton's `/` of FP32 is div.full.f32, off by up to two units in the last place; scales are compared bit for bit.
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
    """Encode scales of finite FP32 amaxes: octavo.numerics.scaling's function, bit for bit.

    ROUNDING is a ScaleRounding: "fp32", or a power of two by "rceil", "floor" or "even". FLOOR is the smallest amax,
    MARGIN the binades to leave free above it.
    """
    lowest: tl.constexpr = max(_NOTHING, FLOOR)
    if (ROUNDING == "fp32" or ROUNDING == "rceil") and MARGIN <= 50:
        # The definition divides in FP64. Both operands are FP32 numbers, so one FP32 rounding of their quotient is what
        # FP64's, rounded again, would be.
        # An amax below 1 takes a dividend 2^64 smaller: neither the quotient nor the dividend leaves FP32's range.
        dividend: tl.constexpr = MAX * 2.0**-MARGIN
        smallest = tl.full(amax.shape, 2.0**-149, tl.float32)  # the smallest subnormal, instead of dividing by 0
        large = amax >= 1.0
        quotient = tl.div_rn(tl.where(large, dividend, dividend * 2.0**-64), tl.maximum(amax, smallest))
        # Limited before the factor of 2^64, so that a quotient beyond FP32 ends at its maximum, not at infinity.
        quotient = tl.where(large, quotient, tl.minimum(quotient, _FP32_MAX * 2.0**-64) * 2.0**64)
        of_lowest: tl.constexpr = max(min(dividend / lowest, _FP32_MAX), _FP32_TINY)
        # FLOOR is an FP64 number: compare in FP32 with the smallest FP32 number that is not below it. The compiler
        # folds these lines into a constant.
        exact = tl.full(amax.shape, lowest, tl.float64)
        first = exact.to(tl.float32)  # rounded to nearest, so perhaps below FLOOR: then the next number up
        first = tl.where(
            first.to(tl.float64) < exact, first.to(tl.int32, bitcast=True) + 1, first.to(tl.int32, bitcast=True)
        )
        raised = amax < first.to(tl.float32, bitcast=True)
        encode = tl.where(raised, of_lowest, tl.maximum(quotient, _FP32_TINY))
        if ROUNDING == "rceil":  # clear the fraction: a power of two down for encode is one up for its reciprocal
            encode = (encode.to(tl.int32, bitcast=True) & _INFINITY_BITS).to(tl.float32, bitcast=True)
        return encode
    # The rest: margins that take the dividend out of FP32's range, and the rules that read amax's exponent only.
    largest = tl.maximum(amax.to(tl.float64), tl.full(amax.shape, lowest, tl.float64))
    if ROUNDING == "fp32" or ROUNDING == "rceil":
        quotient = tl.full(amax.shape, MAX * 2.0**-MARGIN, tl.float64) / largest
        quotient = tl.maximum(quotient, tl.full(amax.shape, _FP32_TINY, tl.float64))
        encode = tl.minimum(quotient, tl.full(amax.shape, _FP32_MAX, tl.float64)).to(tl.float32)
        if ROUNDING == "rceil":
            encode = (encode.to(tl.int32, bitcast=True) & _INFINITY_BITS).to(tl.float32, bitcast=True)
    else:
        bits = largest.to(tl.int64, bitcast=True)
        if ROUNDING == "even":  # add half of the format's last mantissa step: its upper half carries into the exponent
            bits += tl.full(amax.shape, 1 << (51 - MANTISSA), tl.int64)
        # floor(log2 amax) from FP64's exponent field, where FP32's subnormals are normal numbers too. log2 rounds, and
        # would be a binade off just below powers of two.
        exponent = ((bits >> 52) - 1023).to(tl.int32)
        top: tl.constexpr = 8 if MANTISSA == 3 else 15  # floor(log2 maximum)
        # Within the exponents of normal FP32 numbers, so that the stored reciprocal is finite and not 0.
        encode = (tl.minimum(tl.maximum(top - MARGIN - exponent, -126), 127) + 127) << 23
        encode = encode.to(tl.float32, bitcast=True)
    return encode


@triton.jit
def _hardware_codes(scaled, MANTISSA: tl.constexpr):
    """FP32 numbers to uint8 codes by the conversion instruction, four at a time: LEAST_PER_WARP for each warp or more.

    Triton's own conversion leaves pairs of codes in 16-bit registers. Where one kernel stores such pairs and takes them
    apart too, ptxas 12.8 reads some bytes before they are written (Triton 3.6 and 3.7: wrong codes of matrices
    that are cast both ways). Words of four codes have no halves to confuse.
    """
    # Each instruction's first source is the upper byte of its result.
    E4M3_WORD: tl.constexpr = (
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
        "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }"
    )
    E5M2_WORD: tl.constexpr = (
        "{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1; "
        "cvt.rn.satfinite.e5m2x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }"
    )
    assembly: tl.constexpr = E4M3_WORD if MANTISSA == 3 else E5M2_WORD
    return tl.inline_asm_elementwise(assembly, "=r,f,f,f,f", [scaled], dtype=tl.uint8, is_pure=True, pack=4)


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

    ``infinite`` is the mask of inputs that were ±Inf before scaling; with PROPAGATE those become NaN (E4M3) or ±Inf
    (E5M2), else ±maximum. None means that no input was. The scaled number cannot tell: a finite input may overflow in
    the product, and saturates.
    """
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude_bits = bits & _MAGNITUDE_BITS
    sign = ((bits >> 24) & 0x80).to(tl.uint8)
    if HARDWARE:  # cvt.rn.satfinite: rounds to nearest even and saturates, infinities too
        codes = _hardware_codes(scaled, MANTISSA)
    else:
        # 0 instead of NaN, whose code is set below.
        limited = tl.where(magnitude_bits > _INFINITY_BITS, 0, magnitude_bits).to(tl.float32, bitcast=True)
        # Limiting before rounding saturates as limiting after it would, since the maximum is a code itself.
        limited = tl.minimum(limited, MAX)
        limited_bits = limited.to(tl.int32, bitcast=True)
        dropped: tl.constexpr = 23 - MANTISSA  # fraction bits that the format lacks: 20 (E4M3), 21 (E5M2)
        # Half of the last kept bit, less one where that bit is 0 (ties to even); a carry raises the exponent.
        to_even = ((1 << (dropped - 1)) - 1) + ((limited_bits >> dropped) & 1)
        normal = ((limited_bits + to_even) >> dropped) - ((127 - BIAS) << MANTISSA)  # exponent with the format's bias
        # Added to 2^23 times the smallest number, a subnormal is rounded by the addition itself: the sum's last bit is
        # the format's smallest step, and the difference of the bits is the number of steps, which is the code.
        anchor: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
        anchor_bits: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
        subnormal = (limited + anchor).to(tl.int32, bitcast=True) - anchor_bits
        smallest_normal: tl.constexpr = 2.0 ** (1 - BIAS)
        codes = tl.where(limited < smallest_normal, subnormal, normal).to(tl.uint8) | sign
        codes = tl.where(magnitude_bits > _INFINITY_BITS, 0x7F, codes).to(tl.uint8)
    if PROPAGATE and infinite is not None:
        if MANTISSA == 3 and HARDWARE:  # without a sign, as cvt writes every NaN and as codes_of gets from its fma
            codes = tl.where(infinite, 0x7F, codes).to(tl.uint8)
        else:
            infinity_code: tl.constexpr = 0x7F if MANTISSA == 3 else 0x7C  # E4M3 has no infinity: NaN
            codes = tl.where(infinite, infinity_code | sign, codes).to(tl.uint8)
    return codes


@triton.jit
def number_from_code(codes, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr):
    """uint8 codes as FP32 numbers, exact, NaN and ±Inf included."""
    if HARDWARE:  # exact in both ways: every code is an FP32 number
        if MANTISSA == 3:
            values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            values = codes.to(tl.float8e5, bitcast=True).to(tl.float32)
    else:
        # Exponent and mantissa moved to FP32's places; a multiplication corrects the bias, and normalizes subnormals.
        wide = codes.to(tl.int32)
        shift: tl.constexpr = 23 - MANTISSA
        unshift: tl.constexpr = 2.0**120 if MANTISSA == 3 else 2.0**112  # 127 less the format's bias
        values = ((wide & 0x7F) << shift).to(tl.float32, bitcast=True) * unshift
        # The two formats end differently: E4M3 has one NaN a sign, E5M2 keeps the top exponent for ±Inf and NaN.
        if MANTISSA == 3:
            values = tl.where((wide & 0x7F) == 0x7F, float("nan"), values)
        else:
            values = tl.where((wide & 0x7F) == 0x7C, float("inf"), values)
            values = tl.where((wide & 0x7F) > 0x7C, float("nan"), values)
        values = tl.where((wide & 0x80) != 0, -values, values)
    return values

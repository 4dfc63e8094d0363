"""The amax → scale formula in plain Python: fractions for the roundings to float32, IEEE doubles for the rest."""

import math
import struct
from fractions import Fraction

FLOAT32_MAX = struct.unpack("<f", struct.pack("<I", 0x7F7F_FFFF))[0]
FLOAT32_MIN_NORMAL = math.ldexp(1.0, -126)


def nearest_float32(exact: Fraction) -> float:
    """Round a positive fraction to float32, ties to even; subnormals are kept, beyond the maximum is infinity."""
    exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > exact  # now 2^exponent ≤ exact < 2^(exponent + 1)
    quantum = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(exact / quantum) * quantum
    return float(rounded) if rounded <= Fraction(FLOAT32_MAX) else math.inf


def encode_scale(
    amax: float, maximum: float, *, rounding: str = "fp32", amax_floor: float = 0.0, margin: int = 0
) -> float:
    largest = max(amax, amax_floor)
    if rounding in ("floor", "even"):
        return _encode_exponent(largest, maximum, margin, even=rounding == "even")
    quotient = maximum / 2**margin / largest if largest else math.inf  # one IEEE double division
    limited = FLOAT32_MAX if quotient > FLOAT32_MAX else max(quotient, FLOAT32_MIN_NORMAL)
    rounded = nearest_float32(Fraction(limited))
    return 2.0 ** (math.frexp(rounded)[1] - 1) if rounding == "rceil" else rounded


def _encode_exponent(largest: float, maximum: float, margin: int, *, even: bool) -> float:
    """OCP MX §6.3: 2^(emax - floor(log2 amax)); ``even`` rounds amax to the format's mantissa bits first."""
    if not largest:
        return 2.0**127
    exact = Fraction(largest)
    exponent = math.frexp(largest)[1] - 1
    if even:
        mantissa_bits = {448.0: 3, 57344.0: 2, 240.0: 3}[maximum]
        quantum = Fraction(2) ** (exponent - mantissa_bits)
        exponent = math.frexp(float(round(exact / quantum) * quantum))[1] - 1
    return math.ldexp(1.0, min(127, max(-126, math.frexp(maximum)[1] - 1 - margin - exponent)))


def decode_scale(encode: float) -> float:
    return nearest_float32(1 / Fraction(encode))


def bits(value: float) -> int:
    """The 32 bits of a float32."""
    pattern: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return pattern

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
    amax: float, maximum: float, *, power_of_two: bool = False, amax_floor: float = 1e-12, margin: int = 0
) -> float:
    largest = max(amax, amax_floor)
    quotient = maximum / 2**margin / largest if largest else math.inf  # one IEEE double division
    limited = FLOAT32_MAX if quotient > FLOAT32_MAX else max(quotient, FLOAT32_MIN_NORMAL)
    rounded = nearest_float32(Fraction(limited))
    return 2.0 ** (math.frexp(rounded)[1] - 1) if power_of_two else rounded


def decode_scale(encode: float) -> float:
    return nearest_float32(1 / Fraction(encode))


def bits(value: float) -> int:
    """The 32 bits of a float32."""
    pattern: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return pattern

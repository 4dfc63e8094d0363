"""The scalar oracle: decode, encode and round one number, slowly and obviously.

Every fast path in octavo is compared with these functions. They compute with ``fractions.Fraction``, so that no
rounding happens but the one that is asked for.
"""

import math
from fractions import Fraction

from octavo.formats import Format, Specials

__all__ = ["decode", "encode", "encode_stochastic"]


def decode(code: int, fmt: Format) -> float:
    """Value of a code; exact, NaN and ±Inf included.

    Example:
        >>> from octavo.formats import E4M3
        >>> decode(0x7E, E4M3), decode(0x81, E4M3)
        (448.0, -0.001953125)
    """
    if fmt.specials is Specials.FNUZ and code == fmt.sign_mask:
        return math.nan
    sign = -1.0 if code & fmt.sign_mask else 1.0
    magnitude = code & fmt.magnitude_mask
    if magnitude <= fmt.max_code:
        return sign * fmt.magnitude(magnitude)
    return sign * math.inf if code in fmt.inf_codes else math.nan


def encode(value: float, fmt: Format, *, saturate: bool = True, propagate_inf: bool = True) -> int:
    """Code of ``value`` under round-to-nearest-even.

    The value is rounded as if the exponent were unbounded and compared with the maximum afterwards, so that
    E4M3 keeps 464 (a tie, rounds to 448) and E5M2 loses 61440 (a tie, rounds away).

    Args:
        value: any float.
        fmt: target format with a sign.
        saturate: a finite value that rounds beyond the maximum becomes ±maximum; otherwise ±Inf, or NaN without Inf.
        propagate_inf: an infinite value becomes ±Inf, or NaN where there is none; otherwise ±maximum.

    Example:
        >>> from octavo.formats import E4M3, E5M2
        >>> hex(encode(464.0, E4M3, saturate=False)), hex(encode(61440.0, E5M2, saturate=False))
        ('0x7e', '0x7c')
    """
    if math.isnan(value):
        return _nan_code(value, fmt)
    if math.isinf(value):
        return _overflow_code(value, fmt) if propagate_inf else _with_sign(value, fmt.max_code, fmt)
    quotient, quantum = _quotient(value, fmt)
    return _finite_code(value, round(quotient) * quantum, fmt, saturate=saturate)


def encode_stochastic(value: float, fmt: Format, *, uniform: Fraction) -> int:
    """Code of a finite ``value``, rounded up in magnitude when its dropped fraction plus ``uniform`` reaches 1.

    Args:
        uniform: a number in [0, 1); the same for every call gives a deterministic result.
    """
    quotient, quantum = _quotient(value, fmt)
    return _finite_code(value, math.floor(quotient + uniform) * quantum, fmt, saturate=True)


def _quotient(value: float, fmt: Format) -> tuple[Fraction, Fraction]:
    """|value| in units of the spacing of its binade, and that spacing."""
    exponent = max(math.frexp(value)[1] - 1, 1 - fmt.bias) if value else 1 - fmt.bias
    quantum = Fraction(2) ** (exponent - fmt.mantissa_bits)
    return Fraction(abs(value)) / quantum, quantum


def _finite_code(value: float, rounded: Fraction, fmt: Format, *, saturate: bool) -> int:
    if rounded > Fraction(fmt.max):
        return _with_sign(value, fmt.max_code, fmt) if saturate else _overflow_code(value, fmt)
    if rounded < Fraction(fmt.min_normal):
        return _with_sign(value, int(rounded / Fraction(fmt.magnitude(1))), fmt)
    exponent = math.frexp(float(rounded))[1] - 1
    mantissa = rounded / Fraction(2) ** (exponent - fmt.mantissa_bits) - (1 << fmt.mantissa_bits)
    return _with_sign(value, ((exponent + fmt.bias) << fmt.mantissa_bits) + int(mantissa), fmt)


def _with_sign(value: float, magnitude: int, fmt: Format) -> int:
    if fmt.specials is Specials.FNUZ and magnitude == 0:
        return 0  # the code of negative zero is NaN
    return magnitude | (fmt.sign_mask if math.copysign(1.0, value) < 0 else 0)


def _overflow_code(value: float, fmt: Format) -> int:
    return _with_sign(value, fmt.inf_codes[0], fmt) if fmt.inf_codes else _nan_code(value, fmt)


def _nan_code(value: float, fmt: Format) -> int:
    """The all-ones magnitude with the value's sign; FNUZ has one NaN."""
    return fmt.nan_codes[0] if fmt.specials is Specials.FNUZ else _with_sign(value, fmt.magnitude_mask, fmt)

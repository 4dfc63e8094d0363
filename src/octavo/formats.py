"""Number formats as frozen rows; every constant is derived from the bit layout, none is typed.

A row says how many exponent and mantissa bits a format has and which codes it gives up for specials. From that follow
its bias, maximum, smallest numbers and counts:

    value = (-1)^sign · 2^(exponent_field - bias) · (1 + mantissa / 2^mantissa_bits)      exponent_field > 0
    value = (-1)^sign · 2^(1 - bias)              · (    mantissa / 2^mantissa_bits)      exponent_field = 0 (subnormal)

Sources: IEEE 754-2019 §3; OCP 8-bit Floating Point Specification 1.0 (E4M3, E5M2); Noune et al., arXiv 2206.02915
(FNUZ); OCP Microscaling Formats 1.0 §5.4 (E8M0).
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import torch

from octavo.errors import ConfigError

__all__ = [
    "BF16",
    "E4M3",
    "E4M3_FNUZ",
    "E5M2",
    "E5M2_FNUZ",
    "E8M0",
    "FORMATS",
    "FP8_FORMATS",
    "FP16",
    "FP32",
    "Format",
    "Specials",
    "format_of",
]


class Specials(StrEnum):
    """Codes that a format reserves for infinities, NaN and negative zero."""

    IEEE = "ieee"  # the top exponent field holds ±Inf (mantissa 0) and NaN
    FN = "fn"  # finite: only the all-ones magnitude is NaN, no Inf
    FNUZ = "fnuz"  # finite, unsigned zero: NaN is the code of negative zero, no Inf
    SCALE = "scale"  # an exponent alone: no sign, no zero, all ones is NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One number format. All quantities are exact Python floats.

    Example:
        >>> E4M3.max, E4M3.min_normal, E4M3.min_subnormal, E4M3.distinct_finite_values
        (448.0, 0.015625, 0.001953125, 253)
        >>> hex(E4M3.max_code), E4M3.inf_codes, [hex(code) for code in E4M3.nan_codes]
        ('0x7e', (), ['0x7f', '0xff'])
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    specials: Specials
    torch_dtype: torch.dtype

    @property
    def bits(self) -> int:
        """Width of a code in bits."""
        return self.sign_bits + self.exponent_bits + self.mantissa_bits

    @property
    def sign_bits(self) -> int:
        """1, or 0 for a scale format."""
        return 0 if self.specials is Specials.SCALE else 1

    @property
    def bias(self) -> int:
        """Number subtracted from the exponent field: 2^(exponent_bits - 1) - 1, and one more for FNUZ."""
        return (1 << (self.exponent_bits - 1)) - (0 if self.specials is Specials.FNUZ else 1)

    @property
    def sign_mask(self) -> int:
        """The sign's bit in a code; 0 for a scale format."""
        return self.sign_bits << (self.exponent_bits + self.mantissa_bits)

    @property
    def magnitude_mask(self) -> int:
        """All bits of a code but the sign."""
        return (1 << (self.exponent_bits + self.mantissa_bits)) - 1

    @property
    def max_code(self) -> int:
        """Code of the largest finite value."""
        match self.specials:
            case Specials.IEEE:
                return self.magnitude_mask - (1 << self.mantissa_bits)
            case Specials.FN | Specials.SCALE:
                return self.magnitude_mask - 1
            case Specials.FNUZ:
                return self.magnitude_mask

    @property
    def inf_codes(self) -> tuple[int, ...]:
        """Codes of +Inf and -Inf; empty where the format has none."""
        if self.specials is not Specials.IEEE:
            return ()
        return (self.max_code + 1, self.sign_mask | (self.max_code + 1))

    @property
    def nan_codes(self) -> tuple[int, ...]:
        """Every NaN code, in ascending order."""
        match self.specials:
            case Specials.FNUZ:
                return (self.sign_mask,)
            case Specials.SCALE:
                return (self.magnitude_mask,)
            case Specials.FN:
                return (self.magnitude_mask, self.sign_mask | self.magnitude_mask)
            case Specials.IEEE:
                magnitudes = range(self.max_code + 2, self.magnitude_mask + 1)
                return (*magnitudes, *(self.sign_mask | magnitude for magnitude in magnitudes))

    @property
    def max(self) -> float:
        """Largest finite value."""
        return self.magnitude(self.max_code)

    @property
    def min_normal(self) -> float:
        """Smallest positive value with a full mantissa."""
        return self.magnitude(0 if self.specials is Specials.SCALE else 1 << self.mantissa_bits)

    @property
    def min_subnormal(self) -> float | None:
        """Smallest positive value; None for a scale format, which has no subnormals."""
        return None if self.specials is Specials.SCALE else self.magnitude(1)

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger value."""
        return math.ldexp(1.0, -self.mantissa_bits)

    @property
    def binades(self) -> int:
        """Number of powers of two from the smallest positive value to the largest, both included."""
        smallest = self.min_normal if self.min_subnormal is None else self.min_subnormal
        return math.frexp(self.max)[1] - math.frexp(smallest)[1] + 1

    @property
    def distinct_finite_values(self) -> int:
        """Number of different finite values; +0 and -0 count once."""
        nan_count = (
            2 * (self.magnitude_mask - self.max_code - 1) if self.specials is Specials.IEEE else len(self.nan_codes)
        )
        negative_zero = 1 if self.specials in (Specials.IEEE, Specials.FN) else 0
        return (1 << self.bits) - nan_count - len(self.inf_codes) - negative_zero

    def magnitude(self, code: int) -> float:
        """Value of a non-negative finite code.

        Example:
            >>> E5M2.magnitude(0x7B)
            57344.0
        """
        field, mantissa = divmod(code, 1 << self.mantissa_bits)
        if self.specials is Specials.SCALE:
            return math.ldexp(1.0, field - self.bias)
        implicit_one = (1 << self.mantissa_bits) if field else 0
        return math.ldexp(implicit_one + mantissa, max(field, 1) - self.bias - self.mantissa_bits)

    def __str__(self) -> str:
        return self.name


E4M3 = Format(name="E4M3", exponent_bits=4, mantissa_bits=3, specials=Specials.FN, torch_dtype=torch.float8_e4m3fn)
E5M2 = Format(name="E5M2", exponent_bits=5, mantissa_bits=2, specials=Specials.IEEE, torch_dtype=torch.float8_e5m2)
E4M3_FNUZ = Format(
    name="E4M3_FNUZ", exponent_bits=4, mantissa_bits=3, specials=Specials.FNUZ, torch_dtype=torch.float8_e4m3fnuz
)
E5M2_FNUZ = Format(
    name="E5M2_FNUZ", exponent_bits=5, mantissa_bits=2, specials=Specials.FNUZ, torch_dtype=torch.float8_e5m2fnuz
)
E8M0 = Format(name="E8M0", exponent_bits=8, mantissa_bits=0, specials=Specials.SCALE, torch_dtype=torch.float8_e8m0fnu)
FP16 = Format(name="FP16", exponent_bits=5, mantissa_bits=10, specials=Specials.IEEE, torch_dtype=torch.float16)
BF16 = Format(name="BF16", exponent_bits=8, mantissa_bits=7, specials=Specials.IEEE, torch_dtype=torch.bfloat16)
FP32 = Format(name="FP32", exponent_bits=8, mantissa_bits=23, specials=Specials.IEEE, torch_dtype=torch.float32)

FP8_FORMATS = (E4M3, E5M2, E4M3_FNUZ, E5M2_FNUZ)
FORMATS = (FP32, BF16, FP16, *FP8_FORMATS, E8M0)


def format_of(dtype: torch.dtype) -> Format:
    """The format of a torch dtype.

    Raises:
        ConfigError: ``dtype`` is none of the rows above.

    Example:
        >>> format_of(torch.float8_e5m2).name
        'E5M2'
    """
    for row in FORMATS:
        if row.torch_dtype is dtype:
            return row
    known = ", ".join(str(row.torch_dtype) for row in FORMATS)
    raise ConfigError(f"{dtype} is not a number format octavo knows; use one of {known}")

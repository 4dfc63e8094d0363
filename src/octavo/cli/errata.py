"""Wrong figures of the article octavo started from, each with the correct one.

The correct figures are computed, from ``octavo.formats`` or by a line of arithmetic, so that they cannot drift from
the library. Wrong statements without a figure are in docs/formats.md.
"""

import math
from dataclasses import dataclass

from octavo.formats import E4M3, E4M3_FNUZ, E5M2, FP16, Format

__all__ = ["Erratum", "errata"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Erratum:
    """One wrong figure and the true one."""

    article: str
    true: str


def errata() -> tuple[Erratum, ...]:
    """Every wrong figure, in the article's order."""
    return (*_ranges(), *_precisions(), *_scalings())


def _ranges() -> tuple[Erratum, ...]:
    return (
        Erratum(
            article="E4M3 reaches ±65,504",
            true=f"±{E4M3.max:,.0f}; {FP16.max:,.0f} is FP16's maximum",
        ),
        Erratum(article="E4M3 goes down to 1.5e-6", true=_smallest(E4M3)),
        Erratum(article="E5M2 reaches ±131K", true=f"±{E5M2.max:,.0f}"),
        Erratum(article="E5M2 goes down to 1.5e-8", true=_smallest(E5M2)),
        Erratum(
            article="the maximum E5M2 value is 240",
            true=f"{E5M2.max:,.0f}; {E4M3_FNUZ.max:,.0f} is the maximum of FNUZ (and IEEE-style) E4M3",
        ),
    )


def _precisions() -> tuple[Erratum, ...]:
    return (
        Erratum(
            article="8 values in each band of magnitude",
            true=f"E4M3: {_values_per_binade(E4M3)}, and {_values_in_top_binade(E4M3)} in its top band; "
            f"E5M2: {_values_per_binade(E5M2)}",
        ),
        Erratum(article="E4M3 holds 3–4 decimal places", true=f"{_decimal_digits(E4M3):.1f} significant digits"),
        Erratum(article="E5M2 holds about 2 decimal places", true=f"{_decimal_digits(E5M2):.1f} significant digits"),
    )


def _scalings() -> tuple[Erratum, ...]:
    steps = math.ceil(math.log(2) / -math.log(0.99))
    window, growth = 32, 4
    mean_scale = ((window - 1) + 1 / growth) / window
    return (
        Erratum(
            article="on overflow multiply the scale by 0.99",
            true=f"one binade back then takes {steps} skipped steps",
        ),
        Erratum(
            article=f"average the scales of a window of {window} steps",
            true=f"the mean lags: when amax grows {growth}-fold, the new one lands at {growth * mean_scale:.1f} times "
            "the format's maximum and saturates",
        ),
    )


def _smallest(row: Format) -> str:
    return f"{row.min_subnormal:.3g} (subnormal), {row.min_normal:.3g} (normal)"


def _values_per_binade(row: Format) -> int:
    return 1 << row.mantissa_bits


def _values_in_top_binade(row: Format) -> int:
    return row.max_code % _values_per_binade(row) + 1


def _decimal_digits(row: Format) -> float:
    return (row.mantissa_bits + 1) * math.log10(2)

"""Wrong figures of the article octavo started from, each with the correct one.

The correct figures are computed, from ``octavo.formats`` or by a line of arithmetic, so that they cannot drift from
the library. Wrong statements without a figure are in docs/concepts/formats.md.
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
    steps = math.ceil(math.log(2) / -math.log(0.99))
    window, growth = 32, 4
    overshoot = (growth * (window - 1) + 1) / window
    pairs = (
        ("E4M3 reaches ±65,504", f"±{E4M3.max:,.0f}; {FP16.max:,.0f} is FP16's maximum"),
        ("E4M3 goes down to 1.5e-6", _smallest(E4M3)),
        ("E5M2 reaches ±131K", f"±{E5M2.max:,.0f}"),
        ("E5M2 goes down to 1.5e-8", _smallest(E5M2)),
        (
            "the maximum E5M2 value is 240",
            f"{E5M2.max:,.0f}; {E4M3_FNUZ.max:,.0f} is the maximum of FNUZ (and IEEE-style) E4M3",
        ),
        (
            "8 values in each band of magnitude",
            (
                f"E4M3: {_values_per_binade(E4M3)}, and {E4M3.max_code % _values_per_binade(E4M3) + 1} in its top "
                f"band; E5M2: {_values_per_binade(E5M2)}"
            ),
        ),
        ("E4M3 holds 3–4 decimal places", f"{_decimal_digits(E4M3):.1f} significant digits"),
        ("E5M2 holds about 2 decimal places", f"{_decimal_digits(E5M2):.1f} significant digits"),
        ("on overflow multiply the scale by 0.99", f"one binade back then takes {steps} skipped steps"),
        (
            f"average the scales of a window of {window} steps",
            (
                f"the mean lags: when amax grows {growth}-fold, the new one lands at {overshoot:.1f} times the "
                "format's maximum and saturates"
            ),
        ),
    )
    return tuple(Erratum(article=article, true=true) for article, true in pairs)


def _smallest(fmt: Format) -> str:
    return f"{fmt.min_subnormal:.3g} (subnormal), {fmt.min_normal:.3g} (normal)"


def _values_per_binade(fmt: Format) -> int:
    return 1 << fmt.mantissa_bits


def _decimal_digits(fmt: Format) -> float:
    return (fmt.mantissa_bits + 1) * math.log10(2)

"""One cast over the looks at it: what the rules about casts iterate over."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.doctor.findings import Finding, Severity
from octavo.doctor.series import CastKey, Period, Series
from octavo.doctor.statistics import CAST_FIELDS
from octavo.doctor.tables import Floats
from octavo.formats import E5M2, FP8_FORMATS, Format
from octavo.kernels.cast_statistics import least_judged_amax
from octavo.numerics.scaling import smallest_scaled_amax

__all__ = ["Track", "longest", "tracks"]

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """One cast, at the looks that found it, while its layer kept its recipe.

    Attributes:
        key: whose.
        steps: [T], rising.
        values: [T, len(CAST_FIELDS)].
        facts: of the layer.
    """

    key: CastKey
    steps: Floats
    values: Floats
    facts: Mapping[str, Any]

    def of(self, name: str) -> Floats:
        """One number: [T]."""
        return self.values[:, CAST_FIELDS.index(name)]

    def spec(self, name: str) -> Any:
        """A fact of the cast: "format", "scaling", "scale_rounding", "margin", "amax_floor" or "rounding"."""
        return self.facts.get("casts", {}).get(f"{self.key.role} {self.key.gemm}", {}).get(name)

    @property
    def growth(self) -> Floats:
        """The amax over the amax that the scale was made for, [T]: the stale ratio without the recipe's margin."""
        return self.of("stale_ratio") * self._room

    @property
    def least_growth(self) -> Floats:
        """The smallest of all scaling groups', [T]; :attr:`growth` is the largest."""
        return self.of("least_stale_ratio") * self._room

    @property
    def is_own(self) -> Mask:
        """Where the amax, of several groups the largest, is clear of the recipe's floor, [T].

        What is not has the floor's scale, or may have it, whatever the tensor does.
        """
        return self.of("amax") > least_judged_amax(self._format, self.amax_floor)

    @property
    def is_floored(self) -> Mask:
        """Where the amax lies below the recipe's floor or FP32's, and has not the scale that it should have, [T]."""
        amax = self.of("amax")
        return (amax > 0) & (amax < smallest_scaled_amax(self._format, self.amax_floor))

    @property
    def amax_floor(self) -> float:
        """As which smaller amaxes count by the recipe; 0 where it has none, or none is known."""
        return float(self.spec("amax_floor") or 0.0)

    @property
    def memory(self) -> int:
        """Steps for which a delayed scale may stay what it is though its tensor moves."""
        window = self.facts.get("history_length", 1) if self.facts.get("statistic") == "max" else 1
        return int(window + self.facts.get("update_interval", 1) - 1)

    @property
    def _format(self) -> Format:
        """Of the cast; the one that reaches farthest where it is unknown."""
        return next((known for known in FP8_FORMATS if known.name == self.spec("format")), E5M2)

    @property
    def _room(self) -> float:
        """What the recipe's margin leaves free above an amax; infinite for one beyond FP64's exponents."""
        return float(np.exp2(float(self.spec("margin") or 0)))

    def finding(
        self,
        where: slice,
        code: str,
        severity: Severity,
        *,
        cause: str,
        weight: float,
        **evidence: float,
    ) -> Finding:
        """A finding about the looks ``where``; evidence that is not finite is left out."""
        steps = self.steps[where]
        return Finding(
            code=code,
            severity=severity,
            path=self.key.path,
            role=self.key.role,
            first_step=int(steps[0]),
            last_step=int(steps[-1]),
            evidence={name: float(value) for name, value in evidence.items() if np.isfinite(value)},
            cause=cause,
            weight=float(weight),
        )


def tracks(series: Series) -> Iterator[Track]:
    """Every cast, in the order in which they ran; a layer whose recipe changed has several of each."""
    table = series.casts
    looks = np.arange(len(table.steps))
    for column, key in enumerate(table.keys):
        rows = table.values[:, column]
        known = ~np.isnan(rows[:, CAST_FIELDS.index("amax")])
        periods = series.periods.get(key.path) or [Period(-np.inf, 0, {})]
        ends = [period.look for period in periods[1:]] + [len(looks)]
        for period, end in zip(periods, ends, strict=True):
            chosen = known & (looks >= period.look) & (looks < end)
            if chosen.any():
                yield Track(key=key, steps=table.steps[chosen], values=rows[chosen], facts=period.facts)


def longest(mask: Mask) -> slice:
    """The longest run of True, the first of equal ones.

    Example:
        >>> longest(np.array([True, False, True, True]))
        slice(2, 4, None)
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    starts, ends = edges[::2], edges[1::2]
    if not starts.size:
        return slice(0, 0)
    best = int(np.argmax(ends - starts))
    return slice(int(starts[best]), int(ends[best]))

"""Statistics of one cast over time, as input of the rules about casts."""

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

__all__ = ["Track", "length", "longest", "module_tracks", "nonfinite_casts", "tracks", "weights"]

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """Statistics of one cast while its layer's facts did not change.

    Attributes:
        key: the cast.
        steps: [T] sampled steps, ascending.
        values: [T, len(CAST_FIELDS)].
        facts: facts about the layer.
    """

    key: CastKey
    steps: Floats
    values: Floats
    facts: Mapping[str, Any]

    def of(self, name: str) -> Floats:
        """One field: [T]."""
        return self.values[:, CAST_FIELDS.index(name)]

    def spec(self, name: str) -> Any:
        """A fact about the cast: "format", "scaling", "scale_rounding", "margin", "amax_floor" or "rounding"."""
        return self.facts.get("casts", {}).get(f"{self.key.role} {self.key.gemm}", {}).get(name)

    @property
    def growth(self) -> Floats:
        """Current amax over the amax of the scale, [T]: the stale ratio without the recipe's margin."""
        return self.of("stale_ratio") * self._headroom

    @property
    def least_growth(self) -> Floats:
        """Minimum growth over scaling groups, [T]; :attr:`growth` is the maximum."""
        return self.of("least_stale_ratio") * self._headroom

    @property
    def is_above_floor(self) -> Mask:
        """True where the amax, the maximum over groups, is well above the recipe's floor, [T].

        Other samples may have the floor's scale, independently of the tensor.
        """
        return self.of("amax") > least_judged_amax(self._format, self.amax_floor)

    @property
    def is_below_floor(self) -> Mask:
        """True where the amax is below the recipe's floor or that of FP32, which then sets the scale, [T]."""
        amax = self.of("amax")
        return (amax > 0) & (amax < smallest_scaled_amax(self._format, self.amax_floor))

    @property
    def amax_floor(self) -> float:
        """Lower clamp of amaxes in the recipe; 0 without a floor or if it is unknown."""
        return float(self.spec("amax_floor") or 0.0)

    @property
    def memory(self) -> int:
        """Number of steps for which a delayed scale may stay constant while its tensor changes."""
        window = self.facts.get("history_length", 1) if self.facts.get("statistic") == "max" else 1
        return int(window + self.facts.get("update_interval", 1) - 1)

    @property
    def _format(self) -> Format:
        """Format of the cast; the one with the widest range if it is unknown."""
        return next((known for known in FP8_FORMATS if known.name == self.spec("format")), E5M2)

    @property
    def _headroom(self) -> float:
        """Headroom above an amax by the recipe's margin, as a factor; infinite beyond FP64's exponents."""
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
        """Build a finding about the samples ``where``; non-finite evidence is left out."""
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
    """Yield a track for every cast, in cast order; several if the layer's recipe changed."""
    table = series.casts
    sample_indices = np.arange(len(table.steps))
    for column, key in enumerate(table.keys):
        rows = table.values[:, column]
        is_known = ~np.isnan(rows[:, CAST_FIELDS.index("amax")])
        periods = series.periods.get(key.path) or [Period(-np.inf, 0, {})]
        ends = [period.sample_index for period in periods[1:]] + [len(sample_indices)]
        for period, end in zip(periods, ends, strict=True):
            is_selected = is_known & (sample_indices >= period.sample_index) & (sample_indices < end)
            if is_selected.any():
                yield Track(key=key, steps=table.steps[is_selected], values=rows[is_selected], facts=period.facts)


def weights(series: Series) -> Iterator[tuple[str, Floats, Floats, Floats]]:
    """Yield path, steps, amax and rms of every weight that is cast, at the samples in which it is; [T] each."""
    table = series.casts
    for path in dict.fromkeys(key.path for key in table.keys if key.role == "weight"):
        columns = [index for index, key in enumerate(table.keys) if key.path == path and key.role == "weight"]
        amax, rms = (np.fmax.reduce(table.of(name)[:, columns], axis=1) for name in ("amax", "rms"))
        is_known = np.isfinite(amax)
        yield path, table.steps[is_known], amax[is_known], rms[is_known]


def module_tracks(series: Series, name: str) -> Iterator[tuple[str, Floats, Floats]]:
    """Yield key, steps [T] and values [T] of each column of ``series.modules[name]``; nothing without this table."""
    if name in series.modules:
        table = series.modules[name]
        yield from ((key, table.steps, table.values[:, column, 0]) for column, key in enumerate(table.keys))


def nonfinite_casts(series: Series) -> tuple[list[CastKey], Floats]:
    """All casts in the order of a step, and their NaN and ±Inf elements [T, C].

    Casts of experts are in other tables, and only of samples in which one has any; see
    :mod:`octavo.doctor.expert_statistics`.
    """
    keys, columns = list(series.casts.keys), list(series.casts.of("nonfinite").T)
    elements = {name: values for name, _, values in module_tracks(series, "expert_nonfinite")}
    places = {name: float(np.fmin.reduce(values)) for name, _, values in module_tracks(series, "casts_before")}
    of_experts = [name for name in elements if name.count(" ") > 1 and np.isfinite(places.get(name, np.nan))]
    for name in sorted(of_experts, key=places.__getitem__)[::-1]:  # the last first: places are of linear layers
        keys.insert(int(places[name]), CastKey(*name.rsplit(" ", 2)))
        columns.insert(int(places[name]), elements[name])
    return keys, np.stack(columns, axis=1) if columns else np.empty((len(series.casts.steps), 0))


def length(where: slice) -> int:
    """Number of samples of a slice."""
    return int(where.stop - where.start)


def longest(mask: Mask) -> slice:
    """Longest run of True; the first of equally long ones.

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

"""A comparison as a section: its table, its picture, its numbers."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.hopper.session import Timings
from octavo.bench.results import Chart, Section, Verdict
from octavo.bench.timing import ratio

__all__ = ["duration", "faster", "gigabytes", "median", "section_of", "speed", "times_as_fast"]


def section_of(
    title: str,
    comparison: Timings,
    *,
    base: str | None = None,
    limit: float | None = None,
    limit_name: str = "limit",
    columns: Mapping[str, Mapping[str, str]] | None = None,
    verdicts: Sequence[Verdict] = (),
    notes: Sequence[str] = (),
    raw: Mapping[str, Any] | None = None,
) -> Section:
    """A row for each variant.

    Args:
        title: of the section.
        comparison: the times.
        base: whom the others' speeds are divided by, round by round.
        limit: the speed that can be reached; a share of it is shown.
        limit_name: what that is.
        columns: further columns, by heading and variant.
        verdicts: the bars judged.
        notes: sentences below.
        raw: further numbers.
    """
    further = columns or {}
    head = ["timed", "median", "speed"]
    head += [f"share of {limit_name}"] if limit is not None else []
    head += [f"speed × {base} (quartiles)"] if base is not None else []
    rows = []
    for name in comparison.seconds:
        found = speed(comparison, name)
        row = [name, duration(median(comparison, name)), f"{found:,.1f} {comparison.entered[name].unit}/s"]
        row += [f"{found / limit:.0%}"] if limit is not None else []
        row += [str(times_as_fast(comparison, name, base)) if base in comparison.seconds else "–"] if base else []
        rows.append((*row, *(cells.get(name, "–") for cells in further.values())))
    unit = next((entry.unit for entry in comparison.entered.values()), "")
    values = {name: speed(comparison, name) for name in comparison.seconds}
    return Section(
        title=title,
        columns=(*head, *further),
        rows=tuple(rows),
        notes=tuple(notes),
        chart=Chart(unit=f"{unit}/s", series={title: values}, line=limit) if values else None,
        verdicts=tuple(verdicts),
        failures=comparison.failures,
        raw={"seconds": comparison.seconds, "work": _work(comparison), **(raw or {})},
    )


def median(comparison: Timings, name: str) -> float:
    """Seconds of a call."""
    return statistics.median(comparison.seconds[name])


def speed(comparison: Timings, name: str) -> float:
    """Work a second, by the median."""
    return comparison.entered[name].work / median(comparison, name)


def times_as_fast(comparison: Timings, name: str, base: str) -> Any:
    """How many times as fast as ``base``, round by round; both do the same work."""
    return ratio(comparison.seconds, base, name)


def faster(comparison: Timings, *names: str) -> str:
    """The one of least median among those that ran; the first where none did."""
    ran = [name for name in names if name in comparison.seconds]
    return min(ran, key=lambda name: median(comparison, name), default=names[0])


def duration(seconds: float) -> str:
    """For a reader.

    Example:
        >>> duration(0.0123), duration(0.0000123)
        ('12.30 ms', '12.3 µs')
    """
    return f"{seconds * 1e3:,.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def gigabytes(nbytes: int) -> str:
    """For a reader; – where nothing was measured."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes else "–"


def _work(comparison: Timings) -> dict[str, str]:
    return {name: f"{entry.work:.6g} {entry.unit}" for name, entry in comparison.entered.items()}

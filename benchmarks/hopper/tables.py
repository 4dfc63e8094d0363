"""Conversion of timings to a section with table, chart and numbers."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.hopper.session import Timings
from octavo.bench.results import Chart, Section, Verdict
from octavo.bench.timing import ratio

__all__ = ["duration", "faster", "gigabytes", "median", "section_of", "speed", "times_as_fast"]


def section_of(
    title: str,
    timings: Timings,
    *,
    base: str | None = None,
    limit: float | None = None,
    limit_name: str = "limit",
    columns: Mapping[str, Mapping[str, str]] | None = None,
    verdicts: Sequence[Verdict] = (),
    notes: Sequence[str] = (),
    raw: Mapping[str, Any] | None = None,
) -> Section:
    """Create a section with a row for each variant.

    Args:
        title: title of the section.
        timings: the times.
        base: variant that the other speeds are divided by, round by round.
        limit: highest possible speed; shares of it are shown.
        limit_name: name of the limit.
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
    for name in timings.seconds:
        found = speed(timings, name)
        row = [name, duration(median(timings, name)), f"{found:,.1f} {timings.variants[name].unit}/s"]
        row += [f"{found / limit:.0%}"] if limit is not None else []
        row += [str(times_as_fast(timings, name, base)) if base in timings.seconds else "–"] if base else []
        rows.append((*row, *(cells.get(name, "–") for cells in further.values())))
    unit = next((entry.unit for entry in timings.variants.values()), "")
    values = {name: speed(timings, name) for name in timings.seconds}
    return Section(
        title=title,
        columns=(*head, *further),
        rows=tuple(rows),
        notes=tuple(notes),
        chart=Chart(unit=f"{unit}/s", series={title: values}, line=limit) if values else None,
        verdicts=tuple(verdicts),
        failures=timings.failures,
        raw={"seconds": timings.seconds, "work": _work(timings), **(raw or {})},
    )


def median(timings: Timings, name: str) -> float:
    """Seconds of a call."""
    return statistics.median(timings.seconds[name])


def speed(timings: Timings, name: str) -> float:
    """Work a second, by the median."""
    return timings.variants[name].work / median(timings, name)


def times_as_fast(timings: Timings, name: str, base: str) -> Any:
    """Speed over that of ``base``, round by round; both do the same work."""
    return ratio(timings.seconds, base, name)


def faster(timings: Timings, *names: str) -> str:
    """Name of the variant with the smallest median among those that ran; the first if none did."""
    ran = [name for name in names if name in timings.seconds]
    return min(ran, key=lambda name: median(timings, name), default=names[0])


def duration(seconds: float) -> str:
    """Format a duration.

    Example:
        >>> duration(0.0123), duration(0.0000123)
        ('12.30 ms', '12.3 µs')
    """
    return f"{seconds * 1e3:,.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def gigabytes(nbytes: int) -> str:
    """Format a number of bytes; "–" for 0, which is not measured."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes else "–"


def _work(timings: Timings) -> dict[str, str]:
    return {name: f"{entry.work:.6g} {entry.unit}" for name, entry in timings.variants.items()}

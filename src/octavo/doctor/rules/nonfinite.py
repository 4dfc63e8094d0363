"""NaN and ±Inf: the first cast that met them, in time and in the order in which a step computes."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from octavo.doctor.findings import Finding, Severity
from octavo.doctor.mended import mended, survived_steps
from octavo.doctor.rules.tracks import Mask
from octavo.doctor.series import Series
from octavo.doctor.thresholds import Thresholds

__all__ = ["nonfinite"]

WORST = 1e6  # nothing else weighs as much


def nonfinite(series: Series, _: Thresholds) -> Iterator[Finding]:
    """One finding at most: what else is not finite comes after it; a note where the run got over all of it."""
    table, over = series.casts, survived_steps(series)
    bad = np.nan_to_num(table.of("nonfinite")) > 0
    bad &= ~_absorbed(series)[:, None] | np.array([key.role != "grad_output" for key in table.keys], dtype=bool)
    lasting = bad & ~np.isin(table.steps, list(over))[:, None]
    failures = [event for event in series.events if event["kind"] == "failure"]
    final = next((event for event in failures if event["step"] not in over), None)
    if lasting.any():
        yield _at_cast(series, lasting, final)
    elif final is not None:
        yield _elsewhere(final)
    elif bad.any() or failures:
        found = _at_cast(series, bad, failures[0]) if bad.any() else _elsewhere(failures[0])
        yield mended(found, max(over))


def _absorbed(series: Series) -> Mask:
    """Looks before which a loss scale was lowered because gradients overflowed, and the step made again: [T]."""
    overflows = np.array([event["step"] for event in series.events if event["kind"] == "overflow"])
    failures = {event["step"] for event in series.events if event["kind"] == "failure"}
    steps = series.casts.steps
    since = np.concatenate([[-np.inf], steps])[: len(steps)]
    return np.array(
        [
            step not in failures and bool(((overflows > before) & (overflows <= step)).any())
            for before, step in zip(since, steps, strict=True)
        ],
        dtype=bool,
    )


def _at_cast(series: Series, bad: Mask, failure: dict[str, Any] | None) -> Finding:
    table = series.casts
    row = int(np.argmax(bad.any(axis=1)))
    column = int(np.argmax(bad[row]))
    key, step, after = table.keys[column], int(table.steps[row]), int(bad[row].sum()) - 1
    elements = float(table.of("nonfinite")[row, column])
    cause = f"NaN or ±Inf reach this cast first ({elements:.0f} elements since the last look)"
    cause += f", {after} casts after it hold some too" if after else ", and no cast after it"
    if failure is not None and failure.get("tensor"):
        cause += f"; the first tensor of the step that broke is the {failure['tensor']}"
    return Finding(
        code="nonfinite",
        severity=Severity.FAIL,
        path=key.path,
        role=key.role,
        first_step=step,
        last_step=int(table.steps[bad.any(axis=1)][-1]),
        evidence={"nonfinite": elements, "casts_after": float(after)},
        cause=cause,
        weight=WORST,
    )


def _elsewhere(failure: dict[str, Any]) -> Finding:
    """A run that broke though every cast was finite."""
    what = failure.get("tensor")
    return Finding(
        code="nonfinite",
        severity=Severity.FAIL,
        first_step=failure["step"],
        last_step=failure["step"],
        evidence={"nonfinite": 1.0},
        cause="the step broke outside of every FP8 cast, "
        + (f"first in the {what}" if what else "and a replay of its batches stayed finite"),
        weight=WORST,
    )

"""NaN and ±Inf: the first cast that met them, where a look can tell, and what an update spread where it cannot."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.doctor.findings import Finding, Severity
from octavo.doctor.mended import mended, survived_steps
from octavo.doctor.rules.tracks import Mask
from octavo.doctor.series import CastKey, Series
from octavo.doctor.thresholds import Thresholds

__all__ = ["nonfinite"]

WORST = 1e6  # nothing else weighs as much


def nonfinite(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """One finding at most: what else is not finite comes after it; a note where the run got over all of it."""
    table, over = series.casts, survived_steps(series)
    bad = np.nan_to_num(table.of("nonfinite")) > 0
    bad &= ~_absorbed(series)[:, None] | np.array([key.role != "grad_output" for key in table.keys], dtype=bool)
    lasting = bad & ~np.isin(table.steps, list(over))[:, None]
    failures = [event for event in series.events if event["kind"] == "failure"]
    final = next((event for event in failures if event["step"] not in over), None)
    if lasting.any():
        yield _at_casts(series, lasting, final)
    elif final is not None:
        yield _elsewhere(final)
    elif (since := _lost_since(series, limits)) is not None:
        yield _in_the_loss(series, since)
    elif bad.any() or failures:
        found = _at_casts(series, bad, failures[0]) if bad.any() else _elsewhere(failures[0])
        yield mended(found, max(over))


def _absorbed(series: Series) -> Mask:
    """Looks before which a loss scale was lowered because gradients overflowed, and the step made again: [T]."""
    overflows = np.sort([event["step"] for event in series.events if event["kind"] == "overflow"])
    failures = [event["step"] for event in series.events if event["kind"] == "failure"]
    steps = series.casts.steps
    until = np.searchsorted(overflows, steps, side="right")  # how many came before each look
    return (np.diff(until, prepend=0) > 0) & ~np.isin(steps, failures)


@dataclass(frozen=True, slots=True)
class _FirstLook:
    """The first look that saw some; its counts are those of all steps since the look before.

    Attributes:
        keys: of the casts that held some, in the order of a step.
        elements: how many, of each.
        since: the first step that the counts are of.
        step: the look's.
        weights: how many layers' weights were cast.
    """

    keys: list[CastKey]
    elements: list[float]
    since: int
    step: int
    weights: int

    @property
    def bad_weights(self) -> int:
        """Layers whose weights held some."""
        return len({key.path for key in self.keys if key.role == "weight"})

    @property
    def knows_order(self) -> bool:
        """Whether the first cast of those is the first that met some, of its step at least.

        What reaches a weight has been through an update, and then through every other weight: which tensor of which
        step began is not seen afterwards. A single bad weight in front of all else was not reached by another.
        """
        if self.since == self.step:
            return self.bad_weights <= 1
        return not self.bad_weights or (self.bad_weights == 1 and self.keys[0].role == "weight" and self.weights > 1)

    @property
    def steps(self) -> str:
        """Those that the counts are of."""
        return f"step {self.step}" if self.since == self.step else f"steps {self.since}-{self.step}"


def _first_look(series: Series, bad: Mask, failure: dict[str, Any] | None) -> _FirstLook:
    table = series.casts
    row = int(np.argmax(bad.any(axis=1)))
    step, since = int(table.steps[row]), int(table.steps[row - 1]) + 1 if row else 1
    has_stopped = failure is not None and failure["step"] == step
    columns = np.flatnonzero(bad[row])
    cast = np.isfinite(table.of("nonfinite")[row])
    return _FirstLook(
        keys=[table.keys[column] for column in columns],
        elements=table.of("nonfinite")[row, columns].tolist(),
        since=step if has_stopped else min(since, step),
        step=step,
        weights=len(
            {table.keys[column].path for column in np.flatnonzero(cast) if table.keys[column].role == "weight"}
        ),
    )


def _at_casts(series: Series, bad: Mask, failure: dict[str, Any] | None) -> Finding:
    look = _first_look(series, bad, failure)
    evidence = {"nonfinite": look.elements[0], "casts_after": len(look.keys) - 1.0}
    if not look.knows_order:
        evidence = {"nonfinite": sum(look.elements), "casts": float(len(look.keys)), "weights": float(look.bad_weights)}
    cause = _in_order(look) if look.knows_order else _everywhere(look)
    broke = _step_that_broke(series, look)
    cause += f"; the loss is not finite from step {broke} on" if broke is not None else ""
    if failure is not None and failure.get("tensor"):
        cause += f"; the first tensor of the step that broke is the {failure['tensor']}"
    return Finding(
        code="nonfinite",
        severity=Severity.FAIL,
        path=look.keys[0].path if look.knows_order else "",
        role=look.keys[0].role if look.knows_order else "",
        first_step=look.step,
        last_step=int(series.casts.steps[bad.any(axis=1)][-1]),
        evidence=evidence,
        cause=cause,
        weight=WORST,
    )


def _in_order(look: _FirstLook) -> str:
    after = len(look.keys) - 1
    then = f", {after} casts after it hold some too" if after else ", and no cast after it"
    elements = f"{look.elements[0]:.0f} elements since the last look"
    if look.since == look.step:
        return f"NaN or ±Inf reach this cast first ({elements}){then}"
    if look.bad_weights:
        return f"NaN or ±Inf are in this weight and no other ({elements}){then}"
    return f"NaN or ±Inf reached this cast in {look.steps} and none before it in a step's order ({elements}){then}"


def _everywhere(look: _FirstLook) -> str:
    which = f"{look.bad_weights} of {look.weights} weights"
    if look.step == 1:
        return f"training began with NaN or ±Inf in {which}"
    if look.since == look.step:
        return f"the update before this step left NaN or ±Inf in {which} at once, and no cast held any before"
    return (
        f"NaN or ±Inf are in {which} and {len(look.keys)} casts, in {look.steps}: an update spread them, "
        "and where they began is not seen afterwards"
    )


def _step_that_broke(series: Series, look: _FirstLook) -> int | None:
    """The first step whose loss is not finite, if the look is about it; None where losses are finite or unknown."""
    steps, losses = series.curve("loss")
    broken = steps[~np.isfinite(losses) & (steps >= look.since) & (steps <= look.step)]
    return int(broken[0]) if broken.size and look.since < look.step else None


def _lost_since(series: Series, limits: Thresholds) -> float | None:
    """The first step from which on no loss is finite, where those are several; None where the last one is."""
    steps, losses = series.curve("loss")
    finite = np.flatnonzero(np.isfinite(losses))
    lost = steps[finite[-1] + 1 if finite.size else 0 :]
    return float(lost[0]) if len(lost) >= limits.persistent_looks else None


def _in_the_loss(series: Series, since: float) -> Finding:
    """A run that goes on with a loss that is no number, though every cast is finite."""
    steps = series.curve("loss")[0]
    return Finding(
        code="nonfinite",
        severity=Severity.FAIL,
        first_step=int(since),
        last_step=int(steps[-1]),
        evidence={"nonfinite": float((steps >= since).sum())},
        cause=f"the loss is NaN or ±Inf since step {since:.0f}, though every cast that was looked at is finite: "
        "it breaks behind the last of them",
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

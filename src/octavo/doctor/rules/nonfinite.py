"""Rule for NaN and ±Inf: the first cast with them, or their extent if an update has spread them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.doctor.findings import Finding, Severity
from octavo.doctor.resolved import as_resolved_note, recovered_steps
from octavo.doctor.rules.tracks import Mask, module_tracks, nonfinite_casts
from octavo.doctor.series import CastKey, Series
from octavo.doctor.thresholds import Thresholds

__all__ = ["nonfinite"]

WORST = 1e6  # the largest weight of all findings


def nonfinite(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find the first non-finite values: one finding at most, since others follow; a note if all were resolved.

    One sample of a cast is enough, as is a step that failed, or three losses in a row up to the last. Gradients that
    overflow under a dynamic loss scale, in a step that is skipped or repeated, do not count.
    """
    recovered = recovered_steps(series)
    keys, elements = nonfinite_casts(series)
    bad = np.nan_to_num(elements) > 0
    bad &= ~_has_absorbed_overflow(series)[:, None] | np.array([key.role != "grad_output" for key in keys], dtype=bool)
    lasting = bad & ~np.isin(series.casts.steps, list(recovered))[:, None]
    failures = [event for event in series.events if event["kind"] == "failure"]
    final = next((event for event in failures if event["step"] not in recovered), None)
    if lasting.any():
        yield _finding_at_casts(series, lasting, final)
    elif final is not None:
        yield _finding_outside_casts(final)
    elif (since := _loss_nonfinite_since(series, limits)) is not None:
        yield _finding_in_loss(series, since)
    elif bad.any() or failures:
        finding = _finding_at_casts(series, bad, failures[0]) if bad.any() else _finding_outside_casts(failures[0])
        yield as_resolved_note(finding, max(recovered))


def _has_absorbed_overflow(series: Series) -> Mask:
    """Samples with an overflow, which lowered the loss scale and skipped the step, since the previous one: [T]."""
    overflows = np.sort([event["step"] for event in series.events if event["kind"] == "overflow"])
    failures = [event["step"] for event in series.events if event["kind"] == "failure"]
    steps = series.casts.steps
    until = np.searchsorted(overflows, steps, side="right")  # number of overflows up to each sample
    return (np.diff(until, prepend=0) > 0) & ~np.isin(steps, failures)


@dataclass(frozen=True, slots=True)
class _FirstNonfinite:
    """First sample with non-finite values; its counts cover all steps since the previous sample.

    Attributes:
        keys: casts with non-finite values, in the order of a step.
        elements: number of non-finite elements of each cast.
        since: first step that the counts cover.
        step: step of the sample.
        weights: number of layers whose weights were cast; those of experts only where one has any.
        expert: the expert with the most of the first cast's, where that is of experts and in the sampled step.
    """

    keys: list[CastKey]
    elements: list[float]
    since: int
    step: int
    weights: int
    expert: int | None

    @property
    def bad_weights(self) -> int:
        """Number of layers with non-finite weights."""
        return len({key.path for key in self.keys if key.role == "weight"})

    @property
    def knows_order(self) -> bool:
        """True if the first of the casts is where the non-finite values of its step started.

        An update spreads non-finite values to all weights, after which their origin cannot be determined. A single
        non-finite weight before all other casts was not reached through another.
        """
        if self.since == self.step:
            return self.bad_weights <= 1
        return not self.bad_weights or (self.bad_weights == 1 and self.keys[0].role == "weight" and self.weights > 1)

    @property
    def steps(self) -> str:
        """Steps that the counts cover."""
        return f"step {self.step}" if self.since == self.step else f"steps {self.since}-{self.step}"


def _first_nonfinite(series: Series, bad: Mask, failure: dict[str, Any] | None) -> _FirstNonfinite:
    all_keys, elements = nonfinite_casts(series)
    steps, row = series.casts.steps, int(np.argmax(bad.any(axis=1)))
    step, since = int(steps[row]), int(steps[row - 1]) + 1 if row else 1
    has_stopped = failure is not None and failure["step"] == step
    columns = np.flatnonzero(bad[row])
    keys = [all_keys[column] for column in columns]
    experts = {name: values[row] for name, _, values in module_tracks(series, "nonfinite_expert")}
    expert = experts.get(" ".join(keys[0]), np.nan)
    return _FirstNonfinite(
        keys=keys,
        elements=elements[row, columns].tolist(),
        since=step if has_stopped else min(since, step),
        step=step,
        weights=len(
            {
                all_keys[column].path
                for column in np.flatnonzero(np.isfinite(elements[row]))
                if all_keys[column].role == "weight"
            }
        ),
        expert=int(expert) if np.isfinite(expert) else None,
    )


def _finding_at_casts(series: Series, bad: Mask, failure: dict[str, Any] | None) -> Finding:
    first = _first_nonfinite(series, bad, failure)
    evidence = {"nonfinite": first.elements[0], "casts_after": len(first.keys) - 1.0}
    if first.knows_order and first.expert is not None:
        evidence["expert"] = float(first.expert)
    if not first.knows_order:
        evidence = {
            "nonfinite": sum(first.elements),
            "casts": float(len(first.keys)),
            "weights": float(first.bad_weights),
        }
    cause = _describe_origin(first) if first.knows_order else _describe_spread(first)
    broke = _first_nonfinite_loss(series, first)
    cause += f"; the loss is not finite from step {broke} on" if broke is not None else ""
    if failure is not None and failure.get("tensor"):
        cause += f"; the first non-finite tensor of the failed step is the {failure['tensor']}"
    return Finding(
        code="nonfinite",
        severity=Severity.FAIL,
        path=first.keys[0].path if first.knows_order else "",
        role=first.keys[0].role if first.knows_order else "",
        first_step=first.step,
        last_step=int(series.casts.steps[bad.any(axis=1)][-1]),
        evidence=evidence,
        cause=cause,
        weight=WORST,
    )


def _describe_origin(first: _FirstNonfinite) -> str:
    after = len(first.keys) - 1
    then = f", {after} later casts have them too" if after else ", and no cast after it"
    elements = f"{first.elements[0]:.0f} elements since the last sample"
    elements += f", expert {first.expert}" if first.expert is not None else ""
    if first.since == first.step:
        return f"NaN or ±Inf reach this cast first ({elements}){then}"
    if first.bad_weights:
        return f"NaN or ±Inf are in this weight and no other ({elements}){then}"
    return f"NaN or ±Inf reached this cast in {first.steps}, and no earlier cast of a step ({elements}){then}"


def _describe_spread(first: _FirstNonfinite) -> str:
    which = f"{first.bad_weights} of {first.weights} weights"
    if first.step == 1:
        return f"training began with NaN or ±Inf in {which}"
    if first.since == first.step:
        return f"the update before this step left NaN or ±Inf in {which} at once, and no cast had any before"
    return (
        f"NaN or ±Inf are in {which} and {len(first.keys)} casts, in {first.steps}: an update spread them, "
        "and their origin is no longer visible"
    )


def _first_nonfinite_loss(series: Series, first: _FirstNonfinite) -> int | None:
    """First step with a non-finite loss among the sample's steps; None if losses are finite or unknown."""
    steps, losses = series.curve("loss")
    broken = steps[~np.isfinite(losses) & (steps >= first.since) & (steps <= first.step)]
    return int(broken[0]) if broken.size and first.since < first.step else None


def _loss_nonfinite_since(series: Series, limits: Thresholds) -> float | None:
    """First step of the final run of non-finite losses, if long enough; None otherwise."""
    steps, losses = series.curve("loss")
    finite = np.flatnonzero(np.isfinite(losses))
    nonfinite_steps = steps[finite[-1] + 1 if finite.size else 0 :]
    return float(nonfinite_steps[0]) if len(nonfinite_steps) >= limits.persistent_looks else None


def _finding_in_loss(series: Series, since: float) -> Finding:
    """Finding about a run that continues with a non-finite loss although every cast is finite."""
    steps = series.curve("loss")[0]
    return Finding(
        code="nonfinite",
        severity=Severity.FAIL,
        first_step=int(since),
        last_step=int(steps[-1]),
        evidence={"nonfinite": float((steps >= since).sum())},
        cause=f"the loss is NaN or ±Inf since step {since:.0f}, although every sampled cast is finite: "
        "it becomes non-finite after the last of them",
        weight=WORST,
    )


def _finding_outside_casts(failure: dict[str, Any]) -> Finding:
    """Finding about a run that failed although every cast was finite."""
    tensor = failure.get("tensor")
    return Finding(
        code="nonfinite",
        severity=Severity.FAIL,
        first_step=failure["step"],
        last_step=failure["step"],
        evidence={"nonfinite": 1.0},
        cause="the step failed outside of every FP8 cast, "
        + (f"first in the {tensor}" if tensor else "and a replay of its batches stayed finite"),
        weight=WORST,
    )

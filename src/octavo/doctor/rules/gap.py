"""Rule for a loss that departs from a reference, such as the same run in BF16."""

from collections.abc import Iterator, Sequence

import numpy as np

from octavo.doctor.findings import FP8_BEGINS, Finding, Severity
from octavo.doctor.losses import common_losses, warmup
from octavo.doctor.series import Series
from octavo.doctor.sliding import sliding_means
from octavo.doctor.tables import Floats
from octavo.doctor.thresholds import Thresholds

__all__ = ["loss_gap"]


def loss_gap(series: Series, reference: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find a growing relative gap of the smoothed losses that exceeds the usual cost of FP8.

    A warning above ``loss_gap``, a failure above ``loss_gap_fail``, judged after the warm-up and ``gap_steps`` steps,
    from the first step in FP8 on. A gap before that step is a warning of its own: FP8 is not its cause.

    Args:
        series: the series of the run.
        reference: the series of a run in high precision with the same data in the same order.
        limits: thresholds of the rules.
    """
    steps, losses, reference_losses = common_losses(series, reference)
    begins = _first_fp8_step(series)
    before = [values[steps < begins] for values in (losses, reference_losses)]
    if len(before[0]) >= limits.gap_steps and before[0].mean() / before[1].mean() - 1 > limits.loss_gap:
        yield _gap_before_fp8(steps, before, begins)
        return
    is_judged = (steps > warmup(series)) & (steps >= begins)
    steps, losses, reference_losses = (values[is_judged] for values in (steps, losses, reference_losses))
    if len(steps) < limits.gap_steps:
        return
    window = max(3, len(steps) // 10)
    gap = sliding_means(losses, window) / sliding_means(reference_losses, window) - 1
    third = len(gap) // 3
    early, late = float(np.mean(gap[:third])), float(np.mean(gap[-third:]))
    if late > limits.loss_gap and late > early:
        yield Finding(
            code="loss-gap",
            severity=Severity.FAIL if late > limits.loss_gap_fail else Severity.WARN,
            first_step=int(steps[int(np.argmax(gap > limits.loss_gap))]),
            last_step=int(steps[-1]),
            evidence={
                "relative_gap": late,
                "early_gap": early,
                "nats": late * float(np.mean(reference_losses[-third:])),
            },
            cause=f"the loss is {late:.2%} above the reference's and the gap grows: it was {early:.2%} after warm-up",
            weight=late,
        )


def _gap_before_fp8(steps: Floats, losses: Sequence[Floats], begins: float) -> Finding:
    """A gap before the first step in FP8; ``losses``: the run's and the reference's until then."""
    gap = float(losses[0].mean() / losses[1].mean()) - 1
    return Finding(
        code="loss-gap",
        severity=Severity.WARN,
        first_step=int(steps[0]),
        last_step=int(begins) - 1,
        evidence={"relative_gap": gap, FP8_BEGINS: begins},
        cause=f"the loss is {gap:.2%} above the reference's before FP8 begins at step {begins:.0f}, so FP8 is not the "
        "cause: the runs differ in more than their precision",
        weight=gap,
    )


def _first_fp8_step(series: Series) -> float:
    """First step in which a layer casts to FP8, as far as samples and changes of precision show; 0 if all do."""
    steps, is_fp8 = series.casts.steps, np.isfinite(series.casts.of("amax")).any(axis=1)
    first = int(np.argmax(is_fp8)) if is_fp8.any() else 0
    if not first:
        return 0.0
    switches = [event["step"] for event in series.events if event["kind"] == "precision"]
    return float(max((step for step in switches if step <= steps[first]), default=steps[first - 1] + 1))

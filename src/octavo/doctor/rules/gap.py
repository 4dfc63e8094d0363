"""A run's loss beside that of a reference, such as the same run in BF16."""

from collections.abc import Iterator

import numpy as np

from octavo.doctor.findings import Finding, Severity
from octavo.doctor.losses import common_losses, warmup
from octavo.doctor.series import Series
from octavo.doctor.sliding import sliding_means
from octavo.doctor.thresholds import Thresholds

__all__ = ["loss_gap"]


def loss_gap(series: Series, reference: Series, limits: Thresholds) -> Iterator[Finding]:
    """A relative gap of the smoothed losses beyond what FP8 may cost, which grows.

    Args:
        series: of the run.
        reference: of one with the same data in the same order, in high precision.
        limits: with ``loss_gap``.
    """
    steps, ours, theirs = common_losses(series, reference)
    known = steps > warmup(series)
    steps, ours, theirs = (values[known] for values in (steps, ours, theirs))
    if len(steps) < limits.gap_steps:
        return
    window = max(3, len(steps) // 10)
    gap = sliding_means(ours, window) / sliding_means(theirs, window) - 1
    third = len(gap) // 3
    early, late = float(np.mean(gap[:third])), float(np.mean(gap[-third:]))
    if late > limits.loss_gap and late > early:
        yield Finding(
            code="loss-gap",
            severity=Severity.FAIL if late > limits.loss_gap_fail else Severity.WARN,
            first_step=int(steps[int(np.argmax(gap > limits.loss_gap))]),
            last_step=int(steps[-1]),
            evidence={"relative_gap": late, "early_gap": early, "nats": late * float(np.mean(theirs[-third:]))},
            cause=f"the loss lies {late:.2%} above the reference's and the gap grows: it was {early:.2%} after warm-up",
            weight=late,
        )

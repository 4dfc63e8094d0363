"""Rule for a loss that departs from a reference, such as the same run in BF16."""

from collections.abc import Iterator

import numpy as np

from octavo.doctor.findings import Finding, Severity
from octavo.doctor.losses import common_losses, warmup
from octavo.doctor.series import Series
from octavo.doctor.sliding import sliding_means
from octavo.doctor.thresholds import Thresholds

__all__ = ["loss_gap"]


def loss_gap(series: Series, reference: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find a growing relative gap of the smoothed losses that exceeds the usual cost of FP8.

    A warning above ``loss_gap``, a failure above ``loss_gap_fail``, judged after the warm-up and ``gap_steps`` steps.

    Args:
        series: the series of the run.
        reference: the series of a run in high precision with the same data in the same order.
        limits: thresholds of the rules.
    """
    steps, losses, reference_losses = common_losses(series, reference)
    is_after_warmup = steps > warmup(series)
    steps, losses, reference_losses = (values[is_after_warmup] for values in (steps, losses, reference_losses))
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

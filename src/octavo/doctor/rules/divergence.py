"""A loss that leaves where it began, in a run in which nothing else is found."""

from collections.abc import Iterator

import numpy as np

from octavo.doctor.findings import Finding, Severity
from octavo.doctor.series import Series
from octavo.doctor.thresholds import Thresholds

__all__ = ["divergence"]

EDGE = 5  # steps whose median stands for the beginning or the end


def divergence(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """A loss that ends far above its beginning. It is asked for where no other rule says more than a note."""
    steps, losses = series.curve("loss")
    steps, losses = steps[np.isfinite(losses)], losses[np.isfinite(losses)]
    if len(losses) < 3 * EDGE:
        return
    began, ended = float(np.median(losses[:EDGE])), float(np.median(losses[-EDGE:]))
    if began <= 0 or ended < limits.diverged_loss * began:
        return
    left = steps[np.flatnonzero(losses <= began)[-1] + 1]  # the median's own step is one of them, the last is not
    yield Finding(
        code="divergence",
        severity=Severity.WARN,
        first_step=int(left),
        last_step=int(steps[-1]),
        evidence={"loss_began": began, "loss_ended": ended},
        cause=f"the loss began at {began:.3g} and ends at {ended:.3g}, above its beginning since step {left:.0f}; no "
        "cast, scale or GEMM that was looked at shows why, so look at the learning rate and the data",
        weight=ended / began,
    )

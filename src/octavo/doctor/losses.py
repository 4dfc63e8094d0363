"""A run's loss beside that of a reference, at the steps that both have."""

from dataclasses import dataclass

import numpy as np

from octavo.doctor.series import Series
from octavo.doctor.tables import Floats

__all__ = ["SEEN_AT", "Gap", "common_losses", "newest_gap", "warmup"]

SEEN_AT = "seen_at"  # in the evidence of a loss that leaves: the first look that can show why
NEWEST_SHARE = 3  # a third of the steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How far a run's loss lies above a reference's; below it where the numbers are negative.

    Attributes:
        relative: share of the reference's loss.
        nats: the difference.
        first_step: of those whose mean it is.
        last_step: the newest of them.
    """

    relative: float
    nats: float
    first_step: int
    last_step: int


def newest_gap(series: Series, reference: Series) -> Gap | None:
    """The mean gap of the newest third of the common steps; None without a step that both have.

    Example:
        >>> from octavo.doctor.series import series_of
        >>> ours, theirs = (series_of([{"kind": "step", "step": 1, "loss": loss}]) for loss in (2.02, 2.0))
        >>> gap = newest_gap(ours, theirs)
        >>> f"{gap.relative:.1%}, {gap.nats:.2f} nats"
        '1.0%, 0.02 nats'
    """
    steps, ours, theirs = common_losses(series, reference)
    if not steps.size:
        return None
    count = -(-len(steps) // NEWEST_SHARE)
    mean = float(np.mean(theirs[-count:]))
    nats = float(np.mean(ours[-count:])) - mean
    relative = nats / mean if mean else 0.0
    return Gap(relative=relative, nats=nats, first_step=int(steps[-count]), last_step=int(steps[-1]))


def warmup(series: Series) -> float:
    """The step at which the learning rate is first at its peak; 0 where it is not known."""
    steps, rates = series.curve("lr")
    return float(steps[int(np.argmax(rates))]) if steps.size else 0.0


def common_losses(series: Series, reference: Series) -> tuple[Floats, Floats, Floats]:
    """Steps that both have a finite loss of, the run's losses there, and the reference's."""
    (steps, ours), (other_steps, theirs) = series.curve("loss"), reference.curve("loss")
    both, here, there = np.intersect1d(steps, other_steps, return_indices=True)
    known = np.isfinite(ours[here]) & np.isfinite(theirs[there])
    return both[known], ours[here][known], theirs[there][known]

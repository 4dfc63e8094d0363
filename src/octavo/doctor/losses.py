"""Comparison of a run's loss with a reference at their common steps."""

from dataclasses import dataclass

import numpy as np

from octavo.doctor.series import Series
from octavo.doctor.tables import Floats

__all__ = ["SEEN_AT", "LossGap", "common_losses", "newest_gap", "warmup"]

SEEN_AT = "seen_at"  # evidence of a divergence: the first sampled step from its start on
NEWEST_SHARE = 3  # a third of the steps


@dataclass(frozen=True, slots=True, kw_only=True)
class LossGap:
    """Mean difference of a run's loss from a reference's, negative where the run's is lower.

    Attributes:
        relative: the difference as a share of the reference's loss.
        nats: the difference in nats.
        standard_error: of that mean over its steps, in nats, on the same batches; None for one step. Another seed may
            move the gap by more.
        held_out: the difference of the newest evaluations that both made at one step, in nats; None without any.
        first_step: the first step of the mean.
        last_step: the last step of the mean.
    """

    relative: float
    nats: float
    standard_error: float | None
    held_out: float | None
    first_step: int
    last_step: int


def newest_gap(series: Series, reference: Series) -> LossGap | None:
    """The mean gap of the newest third of the common steps; None without common steps.

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
    differences, mean = ours[-count:] - theirs[-count:], float(np.mean(theirs[-count:]))
    nats = float(np.mean(differences))
    _, held_out, other_held_out = common_losses(series, reference, "nats")
    return LossGap(
        relative=nats / mean if mean else 0.0,
        nats=nats,
        standard_error=float(np.std(differences, ddof=1)) / count**0.5 if count > 1 else None,
        held_out=float(held_out[-1] - other_held_out[-1]) if held_out.size else None,
        first_step=int(steps[-count]),
        last_step=int(steps[-1]),
    )


def warmup(series: Series) -> float:
    """Step at which the learning rate first reaches its peak; 0 if the rate is unknown."""
    steps, rates = series.curve("lr")
    return float(steps[int(np.argmax(rates))]) if steps.size else 0.0


def common_losses(series: Series, reference: Series, curve: str = "loss") -> tuple[Floats, Floats, Floats]:
    """Steps at which both losses are finite, the run's losses there, and the reference's."""
    (steps, ours), (other_steps, theirs) = series.curve(curve), reference.curve(curve)
    common, our_indices, their_indices = np.intersect1d(steps, other_steps, return_indices=True)
    is_finite = np.isfinite(ours[our_indices]) & np.isfinite(theirs[their_indices])
    return common[is_finite], ours[our_indices][is_finite], theirs[their_indices][is_finite]

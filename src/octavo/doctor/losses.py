"""The loss of a run: its rises, and its comparison with a reference at their common steps."""

from dataclasses import dataclass

import numpy as np

from octavo.doctor.series import Series
from octavo.doctor.tables import Floats

__all__ = [
    "SEEN_AT",
    "LossGap",
    "LossRise",
    "common_losses",
    "finite_losses",
    "loss_rise",
    "newest_gap",
    "scatter",
    "warmup",
]

SEEN_AT = "seen_at"  # evidence of a divergence: the first sampled step from its start on
NEWEST_SHARE = 3  # a third of the steps
EDGE = 5  # losses whose median stands for the level before a rise
NORMAL_DISTANCE = 0.954  # median distance of two normal samples, in standard deviations


@dataclass(frozen=True, slots=True, kw_only=True)
class LossGap:
    """Mean difference of a run's loss from a reference's, negative where the run's is lower.

    Attributes:
        relative: the difference as a share of the reference's loss.
        nats: the difference in nats.
        first_step: the first step of the mean.
        last_step: the last step of the mean.
    """

    relative: float
    nats: float
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRise:
    """Rise of a loss from one step on, as it appears in the curve.

    Attributes:
        before: median of the last losses before, in nats.
        peak: the largest loss.
        peak_step: its step.
        last_step: last step before half of the rise is gone; the newest step if it is not.
    """

    before: float
    peak: float
    peak_step: int
    last_step: int

    @property
    def evidence(self) -> dict[str, float]:
        """Numbers for a finding."""
        return {"loss_rise": self.peak - self.before, "loss_before": self.before, "loss_peak": self.peak}

    def __str__(self) -> str:
        return f"the loss rose from {self.before:.3g} to {self.peak:.3g} at step {self.peak_step}"


def loss_rise(series: Series, start: float, window: float) -> LossRise | None:
    """Rise of the loss to its peak within ``window`` steps from ``start`` on; None if it is not above that before.

    Example:
        >>> from octavo.doctor.series import series_of
        >>> losses = [3.0, 3.0, 3.0, 9.0, 7.0, 5.0, 3.0]
        >>> lines = [{"kind": "step", "step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
        >>> rise = loss_rise(series_of(lines), 4, window=20)
        >>> print(rise, "and lasts until step", rise.last_step)
        the loss rose from 3 to 9 at step 4 and lasts until step 5
    """
    steps, losses = finite_losses(series)
    first, end = np.searchsorted(steps, [start, start + window])
    if not first or first == end:
        return None
    before = float(np.median(losses[max(0, first - EDGE) : first]))
    top = int(first + np.argmax(losses[first:end]))
    peak = float(losses[top])
    back = np.flatnonzero(losses[top:] <= (before + peak) / 2)
    last = top + back[0] - 1 if back.size else -1
    rise = LossRise(before=before, peak=peak, peak_step=int(steps[top]), last_step=int(steps[last]))
    return rise if peak > before else None


def finite_losses(series: Series) -> tuple[Floats, Floats]:
    """Steps and losses, without NaN and infinity."""
    steps, losses = series.curve("loss")
    return steps[np.isfinite(losses)], losses[np.isfinite(losses)]


def scatter(losses: Floats, apart: int = 1) -> float:
    """Standard deviation of losses about their trend, from differences of losses that are ``apart`` steps apart."""
    distances = np.abs(losses[apart:] - losses[:-apart])
    return float(np.median(distances)) / NORMAL_DISTANCE if distances.size else 0.0


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
    mean = float(np.mean(theirs[-count:]))
    nats = float(np.mean(ours[-count:])) - mean
    relative = nats / mean if mean else 0.0
    return LossGap(relative=relative, nats=nats, first_step=int(steps[-count]), last_step=int(steps[-1]))


def warmup(series: Series) -> float:
    """Step at which the learning rate first reaches its peak; 0 if the rate is unknown."""
    steps, rates = series.curve("lr")
    return float(steps[int(np.argmax(rates))]) if steps.size else 0.0


def common_losses(series: Series, reference: Series) -> tuple[Floats, Floats, Floats]:
    """Steps at which both losses are finite, the run's losses there, and the reference's."""
    (steps, ours), (other_steps, theirs) = series.curve("loss"), reference.curve("loss")
    common, our_indices, their_indices = np.intersect1d(steps, other_steps, return_indices=True)
    is_finite = np.isfinite(ours[our_indices]) & np.isfinite(theirs[their_indices])
    return common[is_finite], ours[our_indices][is_finite], theirs[their_indices][is_finite]

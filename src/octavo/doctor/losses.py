"""The loss of a run: its rises, and its comparison with a reference at their common steps."""

from dataclasses import dataclass

import numpy as np

from octavo.doctor.series import Series
from octavo.doctor.sliding import sliding_medians
from octavo.doctor.tables import Floats
from octavo.doctor.thresholds import Thresholds

__all__ = [
    "SEEN_AT",
    "LossGap",
    "LossRise",
    "Plateau",
    "common_losses",
    "finite_losses",
    "level_near_unigram",
    "loss_rise",
    "newest_gap",
    "plateau",
    "plateau_of_unknown_text",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Plateau:
    """A loss that no longer falls, near its beginning.

    Attributes:
        level: median of the newest quarter, in nats.
        first_step: the step from which on it has not fallen.
    """

    level: float
    first_step: int

    def __str__(self) -> str:
        return f"the loss has not fallen since step {self.first_step} and stays at {self.level:.3g}"


def plateau(series: Series, limits: Thresholds) -> Plateau | None:
    """Level of a loss that has not fallen for half of the run and has not left its beginning; None for others.

    Its newest quarter is above ``stuck_loss`` of the first loss, at most ``stalled_loss`` below what it was before the
    middle of the run, ``lasting_rise`` steps ago or more, and at most ``settled_loss`` above its lowest.

    Example:
        >>> from octavo.doctor.series import series_of
        >>> losses = [7.6, 6.0, *[5.3] * 58]
        >>> lines = [{"kind": "step", "step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
        >>> print(plateau(series_of(lines), Thresholds()))
        the loss has not fallen since step 3 and stays at 5.3
    """
    steps, losses = finite_losses(series)
    half = len(losses) // 2
    if half < limits.lasting_rise or losses[0] <= 0:
        return None
    level = float(np.median(losses[-(half // 2) :]))
    smooth = sliding_medians(losses, EDGE)
    low = np.flatnonzero(smooth[: half - EDGE + 1] <= (1 + limits.stalled_loss) * level)
    is_level = level <= (1 + limits.settled_loss) * smooth.min()
    if not low.size or not is_level or level <= limits.stuck_loss * losses[0]:
        return None
    return Plateau(level=level, first_step=int(steps[low[0] + EDGE // 2]))


def plateau_of_unknown_text(series: Series, limits: Thresholds) -> Plateau | None:
    """The plateau of a run whose text is unknown, so that nothing tells a stalled model from a converged one; or None.

    Of known text, a plateau near the unigram entropy is a finding, and one below it a converged model.
    """
    return plateau(series, limits) if series.unigram_nats is None else None


def level_near_unigram(series: Series, limits: Thresholds) -> float | None:
    """Median of the newest quarter of the losses if it is near the unigram entropy or above it; None for others.

    Such a model predicts little more than token frequencies. None of fewer than three ``lasting_rise`` losses, and
    where the text is unknown.

    Example:
        >>> from dataclasses import replace
        >>> from octavo.doctor.series import series_of
        >>> lines = [{"kind": "step", "step": step, "loss": 5.0} for step in range(1, 61)]
        >>> [
        ...     level_near_unigram(replace(series_of(lines), unigram_nats=nats), Thresholds())
        ...     for nats in (5.5, 6.0, None)
        ... ]
        [5.0, None, None]
    """
    _, losses = finite_losses(series)
    if len(losses) < 3 * limits.lasting_rise or series.unigram_nats is None:
        return None
    level = float(np.median(losses[-(len(losses) // 4) :]))
    return level if level >= (1 - limits.unigram_share) * series.unigram_nats else None


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

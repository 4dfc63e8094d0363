"""Rules for a loss that rises far above its beginning, loses most of its progress, or spikes.

A spike is above the loss at the beginning, where the model knew nothing of this text; it may be over.

For the others, medians of the losses at the end, at the beginning and at the best point are compared, relative to the
scatter of the losses. Overshoots of a warm-up or a restarted learning rate recover, so only lasting rises are reported:
those of a tenth of the run, or, at the unigram entropy, where a model predicts token frequencies alone, of a few steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from octavo.doctor.findings import Finding, Severity
from octavo.doctor.losses import SEEN_AT, finite_losses, loss_rise, scatter, warmup
from octavo.doctor.series import Series
from octavo.doctor.sliding import sliding_medians
from octavo.doctor.tables import Floats
from octavo.doctor.thresholds import Thresholds

__all__ = ["divergence", "loss_spike"]

EDGE = 5  # steps whose median stands for the beginning or the end
COLLAPSED = 1e5  # weight of a finding: above its consequences, below NaN
SPIKE = 3  # losses of which two must be high


@dataclass(frozen=True, slots=True)
class _Rise:
    """Rise of a loss from ``began`` to ``ended``, its first step, and its description."""

    began: float
    ended: float
    first_step: float
    description: str


def divergence(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find a loss that ends far above its beginning or far above its best.

    Of 15 losses or more, the median of the last five is ``diverged_loss`` times that of the first five and the newest
    has not recovered; or a gain of ``least_gain`` of the first loss is lost again by ``lost_gain`` for
    ``lasting_rise`` steps or a tenth of the run. Severity fail where the losses settle at one level, such as the
    unigram entropy of the tokens; otherwise a warning, since BF16 may diverge too.
    """
    steps, losses = finite_losses(series)
    if len(losses) < 3 * EDGE:
        return
    unigram, warm = series.unigram_nats, warmup(series)
    detected = _rise_and_level(steps, losses, (warm, unigram), limits)
    if detected is None:
        return
    rise, plateau = detected
    yield Finding(
        code="divergence",
        severity=Severity.WARN if plateau is None else Severity.FAIL,
        first_step=int(rise.first_step),
        last_step=int(steps[-1]),
        evidence={
            "loss_began": rise.began,
            "loss_ended": rise.ended,
            SEEN_AT: _next_sample(series, rise.first_step),
        }
        | ({} if unigram is None else {"unigram_nats": unigram}),
        cause=f"{rise.description} since step {rise.first_step:.0f}{plateau or ''}; later FP8 findings "
        "follow from it, so check the learning rate and the data",
        weight=rise.ended / rise.began if plateau is None else COLLAPSED,
    )


def loss_spike(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find a loss that spikes to ``spike_loss`` times its beginning, in two of three steps.

    Healthy runs, their warm-up included, stay below their beginning but for the scatter of the losses. A warning, also
    if the loss came back: what the run knew is lost.
    """
    steps, losses = finite_losses(series)
    if len(losses) < 2 * EDGE or losses[0] <= 0:
        return
    began = max(float(losses[0]), float(np.median(losses[:EDGE])))
    smooth = sliding_medians(losses, SPIKE)
    high = np.flatnonzero(smooth >= max(limits.spike_loss * began, began + limits.loss_noise * scatter(losses)))
    if not high.size:
        return
    start = float(steps[high[0] + np.argmax(losses[high[0] :] >= smooth[high[0]])])
    rise = loss_rise(series, start, limits.switch_window)
    if rise is None:
        return
    rate_steps, rates = series.curve("lr")
    rate = f", which was {np.interp(start, rate_steps, rates):.3g}" if rates.size else ""
    yield Finding(
        code="loss-spike",
        severity=Severity.WARN,
        first_step=int(start),
        last_step=rise.last_step,
        evidence={**rise.evidence, "loss_began": began, SEEN_AT: _next_sample(series, start)},
        cause=f"{rise}, above its beginning of {began:.3g}: check the learning rate{rate}, and the batches before",
        weight=rise.peak / began,
    )


def _next_sample(series: Series, step: float) -> float:
    """The first sampled step from ``step`` on; ``step`` without one."""
    sampled = series.casts.steps
    return float(min(sampled[sampled >= step], default=step))


def _rise_and_level(
    steps: Floats, losses: Floats, warmup_and_unigram: tuple[float, float | None], limits: Thresholds
) -> tuple[_Rise, str | None] | None:
    """Rise, and description of the level at which the losses settle; arguments as of :func:`_above_its_best`."""
    few, (_, unigram) = int(limits.lasting_rise), warmup_and_unigram
    rise = _above_its_beginning(steps, losses, limits)
    rise = rise or _above_its_best(steps, losses, warmup_and_unigram, limits, lasting=max(few, len(losses) // 10))
    if rise is not None:
        return rise, _describe_plateau(losses[steps >= rise.first_step], unigram, limits)
    rise = None if unigram is None else _above_its_best(steps, losses, warmup_and_unigram, limits, lasting=few)
    plateau = None if rise is None else _describe_plateau(losses[steps >= rise.first_step], unigram, limits)
    return None if rise is None or plateau is None else (rise, plateau)


def _describe_plateau(losses: Floats, unigram: float | None, limits: Thresholds) -> str | None:
    """Description of the level at which the losses settle if the model predicts token frequencies alone, or None.

    If the text's unigram entropy is unknown, any level at which the losses settle counts.
    """
    if len(losses) < limits.lasting_rise:
        return None
    half = len(losses) // 2
    first, level = float(np.median(losses[:half])), float(np.median(losses[half:]))
    if abs(level - first) > limits.settled_loss * level:
        return None
    if unigram is None:
        return f", and stays at {level:.3g}"
    if abs(level - unigram) > limits.unigram_share * unigram:
        return None
    return f", and stays at the unigram entropy of {unigram:.3g}: the model predicts token frequencies only"


def _above_its_beginning(steps: Floats, losses: Floats, limits: Thresholds) -> _Rise | None:
    """Rise above the beginning; the first loss counts as well, for runs whose first updates fail."""
    began, ended = min(float(losses[0]), float(np.median(losses[:EDGE]))), float(np.median(losses[-EDGE:]))
    if began <= 0 or ended < limits.diverged_loss * began or ended - began <= _min_rise(losses, 1, limits):
        return None
    if losses[-1] <= began:  # the newest step has recovered
        return None
    first_step = float(steps[np.flatnonzero(losses <= began)[-1] + 1])
    return _Rise(
        began, ended, first_step, f"the loss began at {began:.3g} and ends at {ended:.3g}, above its beginning"
    )


def _above_its_best(
    steps: Floats,
    losses: Floats,
    warmup_and_unigram: tuple[float, float | None],
    limits: Thresholds,
    *,
    lasting: int,
) -> _Rise | None:
    """Loss of a share of the progress for ``lasting`` steps, or as long as the warm-up took.

    ``warmup_and_unigram``: last step of the warm-up, and the unigram entropy; above it only token frequencies are
    learned.
    """
    warmup_end, unigram = warmup_and_unigram
    warming = int((steps <= warmup_end).sum())
    lasting_start = len(losses) - max(lasting, warming)
    if lasting_start < max(warming, 1):
        return None
    began, best = float(np.median(losses[:EDGE])), float(sliding_medians(losses, lasting).min())
    reference = began if unigram is None or unigram <= best else min(began, unigram)
    level, smooth = best + limits.lost_gain * (reference - best), sliding_medians(losses, EDGE)
    gained = began > 0 and reference - best >= max(limits.least_gain * reference, _min_rise(losses, EDGE, limits))
    below = np.flatnonzero(smooth < level)
    if not gained or not below.size or below[-1] >= lasting_start:
        return None
    first_step = float(steps[below[-1] + EDGE // 2 + 1])
    ended = float(np.median(losses[-EDGE:]))
    description = (
        f"the loss fell from {began:.3g} to {best:.3g} and ends at {ended:.3g}, having lost what it had gained"
    )
    return _Rise(began, ended, first_step, description)


def _min_rise(losses: Floats, apart: int, limits: Thresholds) -> float:
    """Limit that a rise must exceed, in standard deviations of losses that are ``apart`` steps apart."""
    return limits.loss_noise * scatter(losses, apart)

"""A loss that leaves where it began, or loses what it had gained.

The end of a run is compared with its beginning and with its best, each as a median, and by how much the losses scatter.
What a warm-up overshoots, or a restarted learning rate, comes back: only what lasts is said to be lost. At the unigram
entropy, where models that predict token frequencies alone stay, a few steps last long enough; elsewhere a tenth of the
run does.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from octavo.doctor.findings import Finding, Severity
from octavo.doctor.losses import SEEN_AT, warmup
from octavo.doctor.series import Series
from octavo.doctor.sliding import sliding_medians
from octavo.doctor.tables import Floats
from octavo.doctor.thresholds import Thresholds

__all__ = ["divergence"]

EDGE = 5  # steps whose median stands for the beginning or the end
COLLAPSED = 1e5  # weighs more than what follows from it, and less than NaN
OF_A_NORMAL = 0.954  # the median of the distance of two, in standard deviations


@dataclass(frozen=True, slots=True)
class _Rise:
    """A loss that ends too high: from which number to which, since which step, and what that is called."""

    began: float
    ended: float
    left: float
    story: str


def divergence(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """A loss that ends far above its beginning, or far above its best."""
    steps, losses = series.curve("loss")
    steps, losses = steps[np.isfinite(losses)], losses[np.isfinite(losses)]
    if len(losses) < 3 * EDGE:
        return
    unigram, warm = series.unigram_nats, warmup(series)
    detected = _rise_and_level(steps, losses, (warm, unigram), limits)
    if detected is None:
        return
    rise, level = detected
    looks = series.casts.steps
    yield Finding(
        code="divergence",
        severity=Severity.WARN if level is None else Severity.FAIL,
        first_step=int(rise.left),
        last_step=int(steps[-1]),
        evidence={
            "loss_began": rise.began,
            "loss_ended": rise.ended,
            SEEN_AT: float(min(looks[looks >= rise.left], default=rise.left)),
        }
        | ({} if unigram is None else {"unigram_nats": unigram}),
        cause=f"{rise.story} since step {rise.left:.0f}{level or ''}; what FP8 shows from there on follows from it, so "
        "look at the learning rate and the data",
        weight=rise.ended / rise.began if level is None else COLLAPSED,
    )


def _rise_and_level(
    steps: Floats, losses: Floats, known: tuple[float, float | None], limits: Thresholds
) -> tuple[_Rise, str | None] | None:
    """A rise, and what to call the level at which the losses stay; ``known`` as for :func:`_above_its_best`."""
    soon, (_, unigram) = int(limits.lasting_rise), known
    rise = _above_its_beginning(steps, losses, limits)
    rise = rise or _above_its_best(steps, losses, known, limits, lasting=max(soon, len(losses) // 10))
    if rise is not None:
        return rise, _collapsed(losses[steps >= rise.left], unigram, limits)
    rise = None if unigram is None else _above_its_best(steps, losses, known, limits, lasting=soon)
    level = None if rise is None else _collapsed(losses[steps >= rise.left], unigram, limits)
    return None if rise is None or level is None else (rise, level)


def _collapsed(losses: Floats, unigram: float | None, limits: Thresholds) -> str | None:
    """What to call the level at which the losses stay, where a model has unlearned all but token frequencies.

    Without the text any level above the earlier loss counts, if the losses stay there.
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
    return f", and stays at the unigram entropy of {unigram:.3g}: the model predicts token frequencies and no more"


def _above_its_beginning(steps: Floats, losses: Floats, limits: Thresholds) -> _Rise | None:
    """The first loss is that of a run whose first updates blew it up."""
    began, ended = min(float(losses[0]), float(np.median(losses[:EDGE]))), float(np.median(losses[-EDGE:]))
    if began <= 0 or ended < limits.diverged_loss * began or ended - began <= _noise(losses, 1, limits):
        return None
    if losses[-1] <= began:  # the newest step came back
        return None
    left = float(steps[np.flatnonzero(losses <= began)[-1] + 1])
    return _Rise(began, ended, left, f"the loss began at {began:.3g} and ends at {ended:.3g}, above its beginning")


def _above_its_best(
    steps: Floats, losses: Floats, known: tuple[float, float | None], limits: Thresholds, *, lasting: int
) -> _Rise | None:
    """Where a share of what was gained, and held for ``lasting`` steps, is lost for as many, or a warm-up's if longer.

    ``known``: the step at which the warm-up ends, and the unigram entropy, above which only frequencies are gained.
    """
    warm, unigram = known
    warming = int((steps <= warm).sum())
    since = len(losses) - max(lasting, warming)
    if since < max(warming, 1):
        return None
    began, best = float(np.median(losses[:EDGE])), float(sliding_medians(losses, lasting).min())
    above = began if unigram is None or unigram <= best else min(began, unigram)
    level, smooth = best + limits.lost_gain * (above - best), sliding_medians(losses, EDGE)
    gained = began > 0 and above - best >= max(limits.least_gain * above, _noise(losses, EDGE, limits))
    below = np.flatnonzero(smooth < level)
    if not gained or not below.size or below[-1] >= since:
        return None
    left = float(steps[below[-1] + EDGE // 2 + 1])
    ended = float(np.median(losses[-EDGE:]))
    story = f"the loss fell from {began:.3g} to {best:.3g} and ends at {ended:.3g}, having lost what it had gained"
    return _Rise(began, ended, left, story)


def _noise(losses: Floats, apart: int, limits: Thresholds) -> float:
    """What a rise must exceed: so many standard deviations of the losses, from those so many steps apart."""
    return limits.loss_noise * float(np.median(np.abs(losses[apart:] - losses[:-apart]))) / OF_A_NORMAL

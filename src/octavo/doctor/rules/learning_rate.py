"""Rule for a learning rate that jumps, replaces the weights in one update, or is too large for the loss to fall.

A schedule may restart its rate on purpose: the loss then rises, but comes back, and stays below its beginning. A rate
that merely learns less than another does not show in the numbers of one run.
"""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from octavo.doctor.findings import LARGE_UPDATE, REPLACED_WEIGHTS, STALLED_LOSS, Finding, Severity
from octavo.doctor.losses import LossRise, finite_losses, level_near_unigram, loss_rise, plateau, scatter
from octavo.doctor.rules.tracks import length, longest, tracks, weights
from octavo.doctor.series import Series
from octavo.doctor.sliding import sliding_medians
from octavo.doctor.tables import Floats
from octavo.doctor.thresholds import Thresholds

__all__ = ["learning_rate"]

SPIKE = 3  # losses whose median must be high


def learning_rate(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find rates or updates that jump, and updates that replace the weights.

    - A rate, or updates beyond the rate, that grow ``lr_jump`` times within ``switch_window`` steps of a change of
      precision: a warning; a failure if the loss rose.
    - A rate that grows as much elsewhere, and a loss that stays higher or spikes above its beginning. Where the rate is
      ``lr_jump`` times every earlier one, which no restart's is, any rise of the loss counts.
    - One update of three quarters of the matrices by ``replaced_weights`` of their norm, or by ``large_update`` if
      gradients underflow in later samples.
    - Weights that are ``grown_weights`` times as large as at first, and a loss that does not fall.
    - Weights that are ``grown_at_unigram`` times as large, and a loss that ends near the unigram entropy of the text.
    """
    switches = [float(event["step"]) for event in series.events if event["kind"] == "precision"]
    for switch in switches:
        rise = loss_rise(series, switch, limits.switch_window) if _lasts(series, switch, limits) else None
        severity = Severity.WARN if rise is None else Severity.FAIL
        yield from _find_jump(series, limits, (switch, f"the switch at step {switch:.0f}"), rise, severity)
    jumps = list(islice(_jumps_elsewhere(series, switches, limits), 1))
    yield from jumps
    yield from list(() if jumps else _stalled(series, limits)) or _large_update(series, limits)


def _jumps_elsewhere(series: Series, switches: list[float], limits: Thresholds) -> Iterator[Finding]:
    steps, rates = series.curve("lr")
    with np.errstate(all="ignore"):
        jumps = np.flatnonzero(rates[1:] / rates[:-1] >= limits.lr_jump) + 1
    at_switches = np.searchsorted(steps, switches)  # the first step of another precision
    for step in steps[jumps[(jumps > limits.lr_settled) & ~np.isin(jumps, at_switches)]]:
        is_highest = rates[steps >= step][0] >= limits.lr_jump * rates[steps < step].max()
        lasts = _lasts(series, step, limits) and _lasts(series, step, limits, newest=True)
        rise = loss_rise(series, step, limits.switch_window)
        if rise is not None and (lasts or _is_high(series, step, rise, limits, any_rise=bool(is_highest))):
            yield from _find_jump(series, limits, (float(step), f"step {step:.0f}"), rise, Severity.WARN)


def _find_jump(
    series: Series, limits: Thresholds, since: tuple[float, str], rise: LossRise | None, severity: Severity
) -> Iterator[Finding]:
    """Find a jump of the rate or the updates; ``since``: its step and the step's description."""
    start, name = since
    rate, updates = _rate_jump(series, start), _update_jump(series, start, limits.switch_window)
    if max(rate, updates) < limits.lr_jump:
        return
    is_rate = rate >= limits.lr_jump
    by = f"the learning rate is {rate:.3g}x as large" if is_rate else f"updates are {updates:.3g}x as large"
    newest = _newest_step(series, start)
    raised = _raised_until(series, start, limits) if is_rate else newest
    during = f"since {name}" if raised >= newest else f"from {name} to {raised:.0f}"
    yield Finding(
        code="learning-rate",
        severity=severity,
        first_step=int(start),
        last_step=int(raised if rise is None else max(raised, rise.last_step)),
        evidence={"lr_ratio": rate, "update_ratio_jump": updates}
        | ({"loss_rise": 0.0} if rise is None else rise.evidence),
        cause=f"{by} {during}" + (f", and {rise}" if rise is not None else ""),
        weight=max(rate, updates),
    )


def _stalled(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find weights that grew under a loss that does not fall, or that stays near the unigram entropy."""
    growth = _growth(series)
    flat = plateau(series, limits) if growth >= limits.grown_weights else None
    near = level_near_unigram(series, limits) if growth >= limits.grown_at_unigram else None
    if flat is not None:
        level, description = flat.level, str(flat)
    elif near is not None:
        level, description = near, f"the loss ends at {near:.3g}, near the unigram entropy of {series.unigram_nats:.3g}"
    else:
        return
    _, rates = series.curve("lr")
    rate = f" of up to {rates.max():.3g}" if rates.size else ""
    first = float(series.casts.steps[0])
    yield Finding(
        code="learning-rate",
        severity=Severity.WARN,
        first_step=int(first),
        last_step=int(_newest_step(series, first)),
        evidence={STALLED_LOSS: level, "weight_growth": growth}
        | ({} if near is None or series.unigram_nats is None else {"unigram_nats": series.unigram_nats}),
        cause=f"the learning rate{rate} is too large: updates made the weights {growth:.2g}x as large (the median of "
        f"all), and {description}",
        weight=growth,
    )


def _growth(series: Series) -> float:
    """Median over weights of the newest rms over the first; 0 without any."""
    grown = [float(rms[-1] / rms[0]) for _, _, _, rms in weights(series) if rms.size and rms[0] > 0]
    return float(np.median(grown)) if grown else 0.0


def _large_update(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find an update that replaces the weights, or a smaller one before gradients vanish.

    Three quarters of the matrices must be updated so: those that begin at zero are a few, or half of an adapter's.
    """
    table = series.parameters
    updates = table.of("update_ratio")
    for step, row, least in zip(table.steps, updates, _least_updates(updates), strict=True):
        vanished = _vanished_gradients(series, step, limits) if least >= limits.large_update else None
        if least < limits.replaced_weights and vanished is None:
            continue
        size = float(np.median(row[np.isfinite(row)]))
        then = f", and since step {vanished[0]} up to {vanished[2]:.0%} of a gradient is lost" if vanished else ""
        yield Finding(
            code="learning-rate",
            severity=Severity.WARN,
            first_step=int(step),
            last_step=int(step) if vanished is None else vanished[1],
            evidence={REPLACED_WEIGHTS if least >= limits.replaced_weights else LARGE_UPDATE: size},
            cause=f"an update changed the matrices by {size:.2g}x their norm (the median of all){then}",
            weight=size,
        )
        return


def _least_updates(ratios: Floats) -> Floats:
    """Update that three quarters of the matrices exceed in each sample, [T]; 0 without any."""
    finite = [row[np.isfinite(row)] for row in ratios]
    return np.array([float(np.quantile(row, 0.25, method="lower")) if row.size else 0.0 for row in finite])


def _vanished_gradients(series: Series, update: float, limits: Thresholds) -> tuple[int, int, float] | None:
    """First and last sample after an update in which a gradient underflows persistently, and the largest share lost."""
    found: list[tuple[int, int, float]] = []
    for track in tracks(series):
        if track.key.role == "grad_output":
            lost = track.of("underflow_fraction")
            where = longest(lost >= limits.underflow_fraction)
            if length(where) >= limits.persistent_looks and track.steps[where][0] > update:
                steps = track.steps[where]
                found.append((int(steps[0]), int(steps[-1]), float(lost[where].max())))
    first, last, most = zip(*found, strict=True) if found else ((), (), ())
    return (min(first), max(last), max(most)) if found else None


def _is_high(series: Series, start: float, rise: LossRise, limits: Thresholds, *, any_rise: bool) -> bool:
    """True if the loss after ``start`` is beyond its scatter in two of three steps, and above the first or any rise."""
    steps, losses = finite_losses(series)
    first, until = np.searchsorted(steps, [start, start + limits.switch_window])
    if until - first < SPIKE:
        return False
    noise = limits.loss_noise * scatter(losses[max(0, first - int(limits.switch_window)) : first])
    level = rise.before + max(noise, limits.loss_rise * rise.before)
    if not any_rise:
        level = max(level, losses[0], limits.spike_loss * rise.before)
    return bool(sliding_medians(losses[first:until], SPIKE).max() > level)


def _newest_step(series: Series, least: float) -> float:
    return float(series.curve("loss")[0].max(initial=least))


def _raised_until(series: Series, start: float, limits: Thresholds) -> float:
    """Last step at which the rate is ``lr_jump`` times that before ``start``, without a gap."""
    steps, rates = series.curve("lr")
    since = steps >= start
    low = np.flatnonzero(rates[since] < limits.lr_jump * rates[~since][-1])
    return float(steps[since][low[0] - 1]) if low.size else _newest_step(series, start)


def _rate_jump(series: Series, switch: float) -> float:
    """First rate after the switch over the last one before; 1 if either is missing."""
    steps, rates = series.curve("lr")
    before, after = rates[steps < switch], rates[steps >= switch]
    return float(after[0] / before[-1]) if before.size and after.size and before[-1] > 0 else 1.0


def _update_jump(series: Series, switch: float, window: float) -> float:
    """Updates after the switch over those before, divided by the change of rate; 1 if either is missing."""
    table = series.parameters
    ratios = _median_of_each_sample(table.of("update_ratio"))
    is_known = np.isfinite(ratios)
    steps, ratios = table.steps[is_known], ratios[is_known]
    before, after = steps < switch, (steps >= switch) & (steps < switch + window)
    rate_steps, rates = series.curve("lr")
    scaled = ratios / np.interp(steps, rate_steps, rates) if rate_steps.size and rates.min() > 0 else ratios
    if not before.any() or not after.any() or scaled[before][-1] <= 0:
        return 1.0
    return float(scaled[after].max() / scaled[before][-1])


def _median_of_each_sample(values: Floats) -> Floats:
    """Median of each sample's finite numbers; NaN without any."""
    return np.array([np.median(row[np.isfinite(row)]) if np.isfinite(row).any() else np.nan for row in values])


def _lasts(series: Series, switch: float, limits: Thresholds, *, newest: bool = False) -> bool:
    """True if the mean loss after the switch is significantly above that before.

    Args:
        series: the series of the run.
        switch: step of the switch.
        limits: thresholds of the rules.
        newest: compare the run's newest losses instead of those after the switch.
    """
    steps, losses = series.curve("loss")
    window = limits.switch_window
    end = float(steps[-1]) + 1 if newest and steps.size else switch + window
    bounds = np.searchsorted(steps, [switch - window, switch, max(switch, end - window), end])
    before, after = losses[bounds[0] : bounds[1]], losses[bounds[2] : bounds[3]]
    if len(before) < 3 or len(after) < 3:
        return False
    rise = float(after[len(after) // 2 :].mean() - before.mean())
    return bool(rise > max(2 * float(before.std()), limits.loss_rise * float(before.mean())))

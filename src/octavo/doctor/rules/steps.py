"""Rules for whole steps: gradient noise, loss scale and learning rate."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from octavo.doctor.findings import Finding, Severity
from octavo.doctor.resolved import as_resolved_note, recovered_steps
from octavo.doctor.rules.tracks import length, longest, tracks
from octavo.doctor.series import Series
from octavo.doctor.tables import Floats
from octavo.doctor.thresholds import Thresholds

__all__ = ["gradient_below_noise", "learning_rate", "loss_scale"]


def gradient_below_noise(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find gradients whose norm is below sqrt(3) times the norm of their quantization noise.

    Three samples with a ratio below ``gradient_to_noise``.
    """
    steps, ratio = series.curve("gradient_to_noise")
    where = longest(ratio < limits.gradient_to_noise)
    if length(where) >= limits.persistent_looks:
        worst = float(ratio[where].min())
        yield Finding(
            code="gradient-below-noise",
            severity=Severity.FAIL if worst < 1 else Severity.WARN,
            first_step=int(steps[where][0]),
            last_step=int(steps[where][-1]),
            evidence={"gradient_to_noise": worst},
            cause=f"the gradient is {worst:.2g}x as large as its quantization noise; "
            "below 1.73x training stops improving",
            weight=1 / max(worst, 1e-3),
        )


def loss_scale(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find a loss scale under which gradients overflow repeatedly, or vanish.

    Too large: ``overflows`` overflows that are ``overflow_rate`` of the steps, or a run that failed in its gradients.
    Too small: ``vanished_fraction`` of a gradient is zero at an rms below ``fp16_rms``.
    """
    yield from _scale_too_large(series, limits)
    yield from _scale_too_small(series, limits)


def _scale_too_large(series: Series, limits: Thresholds) -> Iterator[Finding]:
    overflows = _overflows(series)
    failed = [event for event in series.events if event["kind"] == "failure" and _failed_in_gradients(event)]
    is_final = any(event["step"] not in recovered_steps(series) for event in failed)
    steps = _newest_step(series, 1.0)
    is_frequent = len(overflows) >= limits.overflows and len(overflows) / steps >= limits.overflow_rate
    if not failed and not is_frequent:
        return
    events = overflows + failed
    scale = max(float(event["loss_scale"]) for event in events)
    what = "a gradient is not finite and the run failed" if is_final else "gradients overflowed repeatedly"
    if failed and not is_final:
        what = "a gradient was not finite and the step was repeated"
    finding = Finding(
        code="loss-scale",
        severity=Severity.FAIL if is_final else Severity.WARN,
        first_step=int(events[0]["step"]),
        last_step=int(events[-1]["step"]),
        evidence={"loss_scale": scale, "overflows": float(len(events)), "steps": float(steps)},
        cause=f"the loss scale of {scale:.6g} is too large: {what} ({len(events)} times), while the loss stayed finite",
        weight=math.log2(max(scale, 1.0)),
    )
    yield finding if is_final or is_frequent else as_resolved_note(finding, failed[-1]["step"])


def _newest_step(series: Series, least: float) -> float:
    return float(series.curve("loss")[0].max(initial=least))


def _overflows(series: Series) -> list[dict[str, Any]]:
    """Overflows with a known loss scale; other skipped steps may have another cause."""
    return [event for event in series.events if event["kind"] == "overflow" and event["loss_scale"] is not None]


def _failed_in_gradients(event: dict[str, float]) -> bool:
    scale = event.get("loss_scale") or 1.0
    return scale > 1 and event.get("loss") is not None and str(event.get("tensor") or "gradient").startswith("gradient")


def _scale_too_small(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find FP16 gradients that vanish before they are cast."""
    steps, scales = series.curve("loss_scale")
    if not steps.size:
        return
    gradients = [track for track in tracks(series) if track.key.role == "grad_output"]
    vanishing = []
    for track in gradients:
        small = track.of("rms") <= limits.fp16_rms
        where = longest(small & (track.of("zero_fraction") >= limits.vanished_fraction))
        if length(where) >= limits.persistent_looks:
            vanishing.append((track, where))
    if vanishing:
        track, where = max(vanishing, key=lambda pair: float(pair[0].of("zero_fraction")[pair[1]].max()))
        zeros = float(track.of("zero_fraction")[where].max())
        yield Finding(
            code="loss-scale",
            severity=Severity.WARN,
            first_step=int(track.steps[where][0]),
            last_step=int(track.steps[where][-1]),
            evidence={"loss_scale": float(scales[-1]), "zero_fraction": zeros, "casts": float(len(vanishing))},
            cause=f"the loss scale of {scales[-1]:.6g} is too small: up to {zeros:.0%} of a gradient is zero in FP16 "
            f"before it is cast ({len(vanishing)} of {len(gradients)} gradients, the worst at {track.key.path})",
            weight=zeros,
        )


def learning_rate(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find updates that jump when the precision changes, and rates that jump elsewhere with a lasting rise of loss.

    A rate, or updates beyond the rate, that grow ``lr_jump`` times within ``switch_window`` steps of a change of
    precision are a warning; a failure if the loss rose. A schedule may restart its rate on purpose: the loss then rises
    but recovers.
    """
    switches = [float(event["step"]) for event in series.events if event["kind"] == "precision"]
    for switch in switches:
        rise = _loss_rise(series, switch, limits)
        severity = Severity.WARN if rise is None else Severity.FAIL
        yield from _find_jump(series, limits, (switch, f"the switch at step {switch:.0f}"), rise, severity)
    steps, rates = series.curve("lr")
    with np.errstate(all="ignore"):
        jumps = np.flatnonzero(rates[1:] / rates[:-1] >= limits.lr_jump) + 1
    at_switches = np.searchsorted(steps, switches)  # the first step of another precision
    for step in steps[jumps[(jumps > limits.lr_settled) & ~np.isin(jumps, at_switches)]]:
        rise = _loss_rise(series, float(step), limits)
        if rise is not None and _loss_rise(series, float(step), limits, newest=True) is not None:
            findings = list(_find_jump(series, limits, (float(step), f"step {step:.0f}"), rise, Severity.WARN))
            yield from findings
            if findings:
                return


def _find_jump(
    series: Series, limits: Thresholds, since: tuple[float, str], rise: float | None, severity: Severity
) -> Iterator[Finding]:
    """Find a jump of the rate or the updates; ``since``: its step and the step's description."""
    start, name = since
    rate, updates = _rate_jump(series, start), _update_jump(series, start, limits.switch_window)
    if max(rate, updates) < limits.lr_jump:
        return
    is_rate = rate >= limits.lr_jump
    by = f"the learning rate is {rate:.3g}x as large" if is_rate else f"updates are {updates:.3g}x as large"
    then = f", and the loss rose by {rise:.2g}" if rise is not None else ""
    yield Finding(
        code="learning-rate",
        severity=severity,
        first_step=int(start),
        last_step=int(_newest_step(series, start)),
        evidence={"lr_ratio": rate, "update_ratio_jump": updates, "loss_rise": rise or 0.0},
        cause=f"{by} since {name}{then}",
        weight=max(rate, updates),
    )


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


def _loss_rise(series: Series, switch: float, limits: Thresholds, *, newest: bool = False) -> float | None:
    """Rise of the loss at the switch in nats; None if it is not significant.

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
        return None
    rise = float(after[len(after) // 2 :].mean() - before.mean())
    return rise if rise > max(2 * float(before.std()), limits.loss_rise * float(before.mean())) else None

"""Rules for whole steps: gradient noise and loss scale."""

import math
from collections.abc import Iterator
from typing import Any

from octavo.doctor.findings import Finding, Severity
from octavo.doctor.resolved import as_resolved_note, recovered_steps
from octavo.doctor.rules.tracks import length, longest, tracks
from octavo.doctor.series import Series
from octavo.doctor.thresholds import Thresholds

__all__ = ["gradient_below_noise", "loss_scale"]


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

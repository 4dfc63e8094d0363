"""Check of the loss gap to BF16: a short run and the same run in BF16, under several seeds."""

import math
import statistics
from collections.abc import Callable

from octavo.doctor import Finding, Severity, Thresholds
from octavo.experiments.origin import Origin
from octavo.experiments.paired import Effect, PairedRuns
from octavo.experiments.preflight.check import Check

__all__ = ["gap_check"]

NAME = "gap to BF16"
ERRORS = 3.0  # of the mean's standard errors: fewer are chance


def gap_check(
    origin: Origin,
    limits: Thresholds,
    *,
    steps: int,
    orders: int,
    on_run: Callable[[int], None] = lambda _: None,
) -> Check:
    """Train both for ``steps`` updates under ``orders`` seeds and compare them (:mod:`octavo.experiments.paired`).

    In a warm-up the absence of a gap proves nothing: its small rates keep the weights of all recipes close together.

    Raises:
        ConfigError: a number is out of range.
    """
    if not origin.config.training.is_fp8:
        return Check(name=NAME, said="the recipe casts nothing to FP8")
    runs = PairedRuns(origin, steps=steps, orders=orders, on_run=on_run)
    gap = runs.effect((), runs.layers)
    reference = statistics.fmean(runs.losses(runs.layers))
    relative = gap.nats / reference
    summary = (
        f"{gap.nats:+.4f} ± {gap.error:.4f} nats, {relative:+.2%}: a ratio of {1 + relative:.4f}, after {steps} steps "
        f"from step {origin.first_step} under {orders} seeds"
    )
    severity = _severity(gap, relative, limits)
    counted, warmup = origin.first_step + steps // 2, origin.config.training.warmup_steps
    if severity is None and counted < warmup:
        summary = (
            f"no estimate: the updates that count begin at {counted + 1}, in the warm-up of {warmup}, where recipes "
            f"are still alike; name a run that is past it, or take "
            f"--steps {2 * (warmup - origin.first_step)} ({summary})"
        )
        return Check(name=NAME, said=summary, is_known=False)
    if severity is None:
        return Check(name=NAME, said=summary)
    finding = Finding(
        code="loss-gap",
        severity=severity,
        first_step=origin.first_step + 1,
        last_step=origin.first_step + steps,
        evidence={"relative_gap": relative, "nats": gap.nats, "error": gap.error},
        cause=f"a short run ends {relative:.2%} above the same one in BF16; octavo doctor bisect names the layers",
        weight=relative,
    )
    return Check(name=NAME, said=summary, findings=(finding,))


def _severity(gap: Effect, relative: float, limits: Thresholds) -> Severity | None:
    if not math.isfinite(gap.nats) or gap.nats <= ERRORS * gap.error or relative <= limits.loss_gap:
        return None
    return Severity.FAIL if relative > limits.loss_gap_fail else Severity.WARN

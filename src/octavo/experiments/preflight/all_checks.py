"""All checks before a long run, cheapest first."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from octavo.doctor import Thresholds, series_of
from octavo.doctor.remedies import remedies_for
from octavo.experiments.origin import Origin
from octavo.experiments.preflight.check import Check
from octavo.experiments.preflight.checkpoint import checkpoint_check
from octavo.experiments.preflight.gap import gap_check
from octavo.experiments.preflight.memory import memory_check
from octavo.experiments.preflight.probe import Probe
from octavo.experiments.preflight.ranks import ranks_check
from octavo.experiments.preflight.replayed import replay_check
from octavo.experiments.preflight.shapes import shapes_check

__all__ = ["preflight"]


def preflight(
    origin: Origin,
    *,
    run_dir: Path | None = None,
    steps: int = 20,
    orders: int = 2,
    on_run: Callable[[int], None] = lambda _: None,
) -> Iterator[Check]:
    """Check a configuration before a long run; yield each check as soon as it is finished.

    Args:
        origin: start of the run; its checkpoint is loaded from ``run_dir``.
        run_dir: folder of a run to continue; None for a new run.
        steps: updates of each short run that estimates the gap to BF16.
        orders: number of seeds for this estimate, 2 or more.
        on_run: called with the number of short runs made so far.

    Raises:
        ConfigError: the device is missing, a micro-batch does not fit, or a number is out of range.
    """
    limits = Thresholds()
    check, origin = checkpoint_check(origin, run_dir)
    yield _with_remedies(check)
    probe, step = Probe(origin), origin.first_step + 1
    yield _with_remedies(memory_check(probe))
    yield _with_remedies(replay_check(probe, limits, step=step))
    yield _with_remedies(ranks_check(probe, step=step))
    yield _with_remedies(shapes_check(probe, limits, step=step))
    del probe
    yield _with_remedies(gap_check(origin, limits, steps=steps, orders=orders, on_run=on_run))


def _with_remedies(check: Check) -> Check:
    findings = (replace(finding, remedies=remedies_for(finding, series_of([]))) for finding in check.findings)
    return replace(check, findings=tuple(findings))

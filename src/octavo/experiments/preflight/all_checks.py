"""Everything that is tried before a long run, cheapest first."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from octavo.doctor import Series, Thresholds, series_of
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
    """Try a configuration before it trains for long; each check is given out when it is made.

    Args:
        origin: what is to be trained; ``start`` is filled from ``run_dir``.
        run_dir: of a run that is to be continued; None for a new one.
        steps: updates of the short runs that estimate the gap to BF16.
        orders: seeds that it is estimated under, 2 or more.
        on_run: called with the number of short runs made so far.

    Raises:
        ConfigError: the device is not there, a micro-batch does not fit, or a number is out of range.
    """
    limits, nothing = Thresholds(), series_of([])
    check, origin = checkpoint_check(origin, run_dir)
    yield _with_remedies(check, nothing)
    probe, step = Probe(origin), origin.first_step + 1
    yield _with_remedies(memory_check(probe), nothing)
    yield _with_remedies(replay_check(probe, limits, step=step), nothing)
    yield _with_remedies(ranks_check(probe, step=step), nothing)
    yield _with_remedies(shapes_check(probe, limits, step=step), nothing)
    del probe
    yield _with_remedies(gap_check(origin, limits, steps=steps, orders=orders, on_run=on_run), nothing)


def _with_remedies(check: Check, series: Series) -> Check:
    findings = (replace(finding, remedies=remedies_for(finding, series)) for finding in check.findings)
    return replace(check, findings=tuple(findings))

"""Check that a run can be continued from its newest checkpoint."""

from dataclasses import replace
from pathlib import Path

from octavo.doctor import Finding, Severity
from octavo.errors import CheckpointError
from octavo.experiments.origin import Origin, start_from
from octavo.experiments.preflight.check import Check

__all__ = ["checkpoint_check"]

NAME = "checkpoint"


def checkpoint_check(origin: Origin, run_dir: Path | None) -> tuple[Check, Origin]:
    """Load the newest checkpoint as resuming would.

    Its files must be whole, its configuration and text those of the run, its scaling state complete.

    Returns:
        The check, and the origin at the loaded checkpoint.
    """
    if run_dir is None:
        return Check(name=NAME, said="a new run: nothing to continue"), origin
    try:
        start = start_from(run_dir, origin)
    except CheckpointError as error:
        finding = Finding(code="checkpoint", severity=Severity.FAIL, cause=str(error))
        return Check(name=NAME, said="it cannot be continued from", findings=(finding,)), origin
    if start is None:
        return Check(name=NAME, said="none yet: the run begins with its first weights"), origin
    summary = f"step {start.step} loads: {len(start.weights)} tensors, the optimizer's state, the scaling state"
    return Check(name=NAME, said=summary), replace(origin, start=start)

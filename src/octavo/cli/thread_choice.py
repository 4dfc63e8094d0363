"""CPU threads of a new training where nothing says a number: at most the free cores, and those a quota pays for."""

import torch

from octavo.cli.console import stderr
from octavo.kernels.cores import allowed_cores, usable_cores
from octavo.training.threads import busy_cores, free_threads

__all__ = ["choose_threads"]


def choose_threads() -> int:
    """The number of torch's choice, or fewer: the free cores, or those that a quota pays for. One line says so then."""
    own, cores, busy = torch.get_num_threads(), len(allowed_cores()), busy_cores()
    paid_for = min(own, usable_cores())
    threads = free_threads(cores=cores, busy=busy, most=paid_for)
    if threads < own:
        reason = _busy(busy, cores) if threads < paid_for else f"{usable_cores()} of {cores} cores may be used"
        note = f"{reason}; training with {threads} thread{'' if threads == 1 else 's'} (--threads to choose)"
        stderr().print(note, soft_wrap=True, markup=False)
    return threads


def _busy(busy: int, cores: int) -> str:
    return f"{busy} of {cores} cores {'is' if busy == 1 else 'are'} busy"

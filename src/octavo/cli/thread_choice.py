"""How many CPU threads a new training takes where nothing says it: no more than there are free cores."""

import os

import torch

from octavo.cli.console import stderr
from octavo.training.threads import busy_cores, free_threads

__all__ = ["choose_threads"]


def choose_threads() -> int:
    """The number of torch's choice, or the free cores if those are fewer; one line says so then."""
    cores, busy, most = os.cpu_count() or 1, busy_cores(), torch.get_num_threads()
    threads = free_threads(cores=cores, busy=busy, most=most)
    if threads < most:
        stderr().print(_busy_note(cores=cores, busy=busy, threads=threads), soft_wrap=True, markup=False)
    return threads


def _busy_note(*, cores: int, busy: int, threads: int) -> str:
    """Why fewer threads are used than torch would."""
    plural = "" if threads == 1 else "s"
    verb = "is" if busy == 1 else "are"
    return f"{busy} of {cores} cores {verb} busy; training with {threads} thread{plural} (--threads to choose)"

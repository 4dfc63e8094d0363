"""CPU threads of a new training where nothing says a number: at most the free cores, and those a quota pays for."""

from pathlib import Path

import torch

from octavo.cli.console import stderr
from octavo.kernels.cores import allowed_cores, usable_cores
from octavo.parsing import read_toml
from octavo.training.config import load_config
from octavo.training.run_folder import CONFIG
from octavo.training.threads import busy_cores, free_threads

__all__ = ["choose_threads", "says_threads", "threads_of"]


def says_threads(config: Path | None) -> bool:
    """Whether a configuration file, which has been read before, has a number of threads, be it 0 for torch's choice."""
    return config is not None and "threads" in read_toml(config).get("training", {})


def threads_of(out: Path, *, goes_on: bool) -> int:
    """The number that the run or study in a folder began with, if it ``goes_on``; of a new one, what is free."""
    if goes_on and (out / CONFIG).exists():
        return load_config(out / CONFIG).training.threads
    return choose_threads()


def choose_threads() -> int:
    """The number of torch's choice, or fewer: the free cores, or those that a quota pays for. One line says so then."""
    own, cores, usable, busy = torch.get_num_threads(), len(allowed_cores()), usable_cores(), busy_cores()
    threads = free_threads(cores=cores, busy=busy, most=min(own, usable))
    if threads < own:
        if threads < min(own, usable):
            reason = f"{busy} of {cores} cores {'is' if busy == 1 else 'are'} busy"
        elif usable < cores:
            reason = f"{usable} of {cores} cores may be used"
        else:  # OMP_NUM_THREADS asks for more than there are
            reason = f"torch would use {own} threads on {_count(cores, 'core')}"
        note = f"{reason}; training with {_count(threads, 'thread')} (--threads to choose)"
        stderr().print(note, soft_wrap=True, markup=False)
    return threads


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'' if number == 1 else 's'}"

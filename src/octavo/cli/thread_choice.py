"""Default number of CPU threads of a new run: at most the free cores and the CPU quota."""

from pathlib import Path

import torch

from octavo.cli.console import print_lines
from octavo.kernels.cores import allowed_cores, usable_cores
from octavo.parsing import read_toml
from octavo.training.config import load_config
from octavo.training.run_folder import CONFIG
from octavo.training.threads import busy_cores, free_threads

__all__ = ["choose_threads", "sets_threads", "threads_of"]


def sets_threads(config: Path | None) -> bool:
    """Return True if a configuration file, already validated, sets ``threads``, even to 0 (torch's default)."""
    return config is not None and "threads" in read_toml(config).get("training", {})


def threads_of(out: Path, *, goes_on: bool, ranks: int = 1) -> int:
    """Threads of the run or study in ``out`` if it continues (``goes_on``), otherwise ``choose_threads()``.

    ``ranks`` on this machine share them.
    """
    if goes_on and (out / CONFIG).exists():
        return load_config(out / CONFIG).training.threads
    return max(1, choose_threads() // ranks)


def choose_threads() -> int:
    """Return torch's default, or fewer if cores are busy or a quota is smaller; print a line if fewer."""
    torch_threads, cores, usable, busy = torch.get_num_threads(), len(allowed_cores()), usable_cores(), busy_cores()
    threads = free_threads(cores=cores, busy=busy, most=min(torch_threads, usable))
    if threads < torch_threads:
        if threads < min(torch_threads, usable):
            reason = f"{busy} of {cores} cores {'is' if busy == 1 else 'are'} busy"
        elif usable < cores:
            reason = f"{usable} of {cores} cores are allowed"
        else:  # OMP_NUM_THREADS exceeds the cores
            reason = f"torch would use {torch_threads} threads on {_count(cores, 'core')}"
        note = f"{reason}; training with {_count(threads, 'thread')} (set --threads to change)"
        print_lines(note, to_stderr=True)
    return threads


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'' if number == 1 else 's'}"

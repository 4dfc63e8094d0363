"""CPU threads: how many a stretch of work uses, and how many cores other processes leave for it.

OpenMP's threads wait for each other at the end of every operation. With one thread too many for the free cores, each
operation waits for the thread that has no core, so a run that asks for all cores of a busy machine is slower than one
that asks for the free ones.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["busy_cores", "free_threads", "using_threads"]


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Use ``count`` CPU threads inside the block; 0 changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def busy_cores() -> int:
    """Cores in use: the load average of the last minute, rounded; 0 where the system does not tell it."""
    try:
        return min(round(os.getloadavg()[0]), os.cpu_count() or 1)
    except OSError:
        return 0


def free_threads(*, cores: int, busy: int, most: int) -> int:
    """Threads that find a core each: at least 1, at most ``most``.

    Example:
        >>> free_threads(cores=8, busy=3, most=4), free_threads(cores=2, busy=2, most=2)
        (4, 1)
    """
    return max(1, min(most, cores - busy))

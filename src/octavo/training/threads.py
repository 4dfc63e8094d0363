"""CPU threads: set their number for a block, and count the cores that other processes keep busy.

OpenMP threads wait for each other at the end of every operation. With more threads than free cores, each operation
waits for the thread without a core, so on a busy machine a run with all cores is slower than one with the free cores.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from octavo.kernels.cores import allowed_cores

__all__ = ["busy_cores", "free_threads", "using_threads"]

STAT = Path("/proc/stat")
_LOOK_SECONDS = 0.5


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
    """Number of this process's cores that other work keeps busy, over half a second; 0 if unknown.

    The load average is not used, because it lags: for a minute it still counts work that has ended.
    """
    before = _times()
    if before is None:
        return 0
    time.sleep(_LOOK_SECONDS)
    after = _times()
    assert after is not None
    total, idle = (new - old for new, old in zip(after, before, strict=True))
    return round(len(allowed_cores()) * (1 - idle / total)) if total else 0


def _times() -> tuple[int, int] | None:
    """Total and idle clock ticks of those cores since the machine started (Linux, proc(5))."""
    try:
        lines = STAT.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    names = {f"cpu{core}" for core in allowed_cores()}
    cores = [[int(word) for word in rest[:8]] for name, *rest in map(str.split, lines) if name in names]
    user, nice, system, idle, iowait, *rest = map(sum, zip(*cores, strict=True))
    return user + nice + system + idle + iowait + sum(rest), idle + iowait


def free_threads(*, cores: int, busy: int, most: int) -> int:
    """Number of threads with a free core each: at least 1, at most ``most``.

    Example:
        >>> free_threads(cores=8, busy=3, most=4), free_threads(cores=2, busy=2, most=2)
        (4, 1)
    """
    return max(1, min(most, cores - busy))

"""The cores that this process may use: those of its affinity, and no more than the quota of its containers pays for.

Neither torch nor its OpenMP runtime reads a quota: where 64 cores are seen and two are paid for, 64 threads use up a
period's time at once, and all of them stand still until the next one begins.
"""

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["allowed_cores", "quota_cores", "usable_cores"]

CGROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Cores that this process may use at once, at least 1."""
    allowed, quota = len(allowed_cores()), quota_cores()
    return allowed if quota is None else min(allowed, quota)


def allowed_cores() -> set[int]:
    """The numbers of the cores that this process may run on (``taskset``, a container's set of CPUs)."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def quota_cores() -> int | None:
    """Cores' worth of time that the smallest quota over this process pays for, rounded, at least 1; None without one.

    Read from control groups of version 2 (``cpu.max``) and of version 1 (``cpu.cfs_quota_us``), from the process's own
    group upwards.
    """
    try:
        lines = OWN_GROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    quotas = [quota for line in lines for quota in _quotas(*line.split(":", 2)[1:])]
    return max(1, round(min(quotas))) if quotas else None


def _quotas(controllers: str, group: str) -> Iterator[float]:
    """The quotas of a group and those above it; a container may see its own group as the root."""
    if controllers and "cpu" not in controllers.split(","):
        return
    root = CGROUPS / "cpu" if controllers else CGROUPS
    folder = root / group.lstrip("/")
    for place in (folder, *folder.parents):
        if place.is_relative_to(root):
            yield from _quota(place)


def _quota(folder: Path) -> Iterator[float]:
    """A group's quota in cores: of the time in microseconds that it has in each period."""
    try:
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
    except OSError:
        try:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in ("quota", "period")
            )
        except OSError:
            return
    if quota != "max" and int(quota) > 0:  # version 1 writes -1
        yield int(quota) / int(period)

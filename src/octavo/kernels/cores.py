"""The cores that this process may use: those of its affinity, and no more than the quota of its containers pays for.

Neither torch nor its OpenMP runtime reads a quota: where 64 cores are seen and two are paid for, 64 threads use up a
period's time at once, and all of them stand still until the next one begins.
"""

import os

from octavo.control_groups import read_limits

__all__ = ["allowed_cores", "quota_cores", "usable_cores"]


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

    A quota is the time in microseconds that a control group has in each period.
    """
    limits = read_limits("cpu", "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")
    unlimited = ("max", "-1")  # in version 2, in version 1
    quotas = [int(quota) / int(period) for quota, period in limits if quota not in unlimited]
    return max(1, round(min(quotas))) if quotas else None

"""Sizes against the memory that a machine has, judged before anything is built.

A configuration or a file may ask for more than there is, by a slip or to do harm. numpy and torch answer with errors of
their own, Rust libraries with an abort, and the system by ending a process that has written for minutes. Here the bytes
are estimated, from below, and compared first.
"""

import os
import resource
from contextlib import suppress
from pathlib import Path

import torch

from octavo.errors import ConfigError

__all__ = ["check_fits", "memory_bytes"]

MIB = 1 << 20
CONTROL_GROUP = Path("/sys/fs/cgroup/memory.max")  # of a container: a number or "max"


def memory_bytes(device: torch.device) -> int:
    """All memory that this process may have of the device, used or not, in bytes.

    On a CPU the machine's, its container's or the process's own limit (``ulimit -v``), whichever is lowest.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    process, _ = resource.getrlimit(resource.RLIMIT_AS)
    limits += [] if process == resource.RLIM_INFINITY else [process]
    with suppress(OSError, ValueError):  # no container, or one without a limit
        limits.append(int(CONTROL_GROUP.read_text()))
    return min(limits)


def check_fits(what: str, needed: int, device: torch.device, *, remedy: str) -> None:
    """Refuse what cannot be in the memory of a device.

    Args:
        what: begins the sentence.
        needed: bytes that it takes at least.
        device: where it is to be.
        remedy: ends the sentence.

    Raises:
        ConfigError: the device has less memory.
    """
    if needed > (there := memory_bytes(device)):
        raise ConfigError(
            f"{what} does not fit in the memory of {device.type!r}: it takes at least {needed // MIB:,} MiB of "
            f"{there // MIB:,}; {remedy}"
        )

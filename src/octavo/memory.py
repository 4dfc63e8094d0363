"""Check of a size against the memory of a machine, before anything is allocated.

A configuration or a file may need more memory than there is. numpy and torch then raise their own errors, Rust
libraries abort, and the system may end a process that has run for minutes. Callers therefore estimate a lower bound of
the bytes and check it first.
"""

import os
import resource

import torch

from octavo.control_groups import read_limits
from octavo.errors import ConfigError

__all__ = ["MIB", "check_fits", "memory_bytes"]

MIB = 1 << 20


def memory_bytes(device: torch.device) -> int:
    """Memory of the device that this process may use, allocated or not, in bytes.

    On a CPU, the lowest of the machine's memory, the container's limit and the process's limit (``ulimit -v``).
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    process, _ = resource.getrlimit(resource.RLIMIT_AS)
    limits += [] if process == resource.RLIM_INFINITY else [process]
    groups = read_limits("memory", "memory.max", "memory.limit_in_bytes")
    limits += [int(limit) for (limit,) in groups if limit != "max"]  # version 1 writes nearly 2^63
    return min(limits)


def check_fits(what: str, needed: int, device: torch.device, *, remedy: str) -> None:
    """Raise if an object cannot fit in the memory of a device.

    Args:
        what: the object; begins the message.
        needed: bytes that it takes at least.
        device: where it will be allocated.
        remedy: ends the message.

    Raises:
        ConfigError: the device has less memory.
    """
    if needed > (there := memory_bytes(device)):
        raise ConfigError(
            f"{what} does not fit in the memory of {device.type!r}: it takes at least {needed // MIB:,} MiB of "
            f"{there // MIB:,}; {remedy}"
        )

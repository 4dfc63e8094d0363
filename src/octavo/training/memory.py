"""The peak memory of a stretch of work.

On CUDA, the allocator's own peak. On a Linux CPU, the process's peak resident set (VmHWM of /proc/self/status), which
the kernel resets to the present size when 5 is written to /proc/self/clear_refs. It counts the interpreter, torch's
libraries and the mapped pages of the token files too; memory freed earlier but kept by the C allocator as well. Where
the reset is not allowed, the figure is the peak since the process began; where there is no /proc, ``getrusage``'s.

So a CPU's figure depends on what the process did before: of two equal runs the later one starts from what the earlier
left behind. It says what a machine needs, not what a precision costs, and is not to be compared between runs.
"""

import resource
import sys
from pathlib import Path

import torch

__all__ = ["peak_memory_bytes", "reset_peak_memory"]

CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
RESET_PEAK = "5"


def reset_peak_memory(device: torch.device) -> bool:
    """Start a new measurement; False where the figure will be the process's whole life."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
    except OSError:
        return False
    return True


def peak_memory_bytes(device: torch.device) -> int:
    """The peak since the last reset, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

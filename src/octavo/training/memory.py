"""The memory of a stretch of work: its peak, and what does not fit.

On CUDA, the allocator's own peak. On a Linux CPU, the process's peak resident set (VmHWM of /proc/self/status), which
the kernel resets to the present size when 5 is written to /proc/self/clear_refs. It counts the interpreter, torch's
libraries and the mapped pages of the token files too; memory freed earlier but kept by the C allocator as well. Where
the reset is not allowed, the figure is the peak since the process began; where there is no /proc, ``getrusage``'s.

So a CPU's figure depends on what the process did before: of two equal runs the later one starts from what the earlier
left behind. It says what a machine needs, not what a precision costs, and is not to be compared between runs.
:func:`extra_memory_bytes` is: what one call takes beyond what was there, after the C allocator has given back what it
kept.
"""

import ctypes
import platform
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from octavo.errors import ConfigError
from octavo.memory import check_fits, memory_bytes
from octavo.training.config import RunConfig, TrainingConfig
from octavo.training.precision import resolve_device

__all__ = [
    "check_run_fits",
    "extra_memory_bytes",
    "fitting_in_memory",
    "peak_memory_bytes",
    "reset_peak_memory",
]

MIB = 1 << 20
COPIES = 4  # weights, gradients, two moments
# What torch raises as a bare RuntimeError: its CPU allocator on Linux and on Windows, the CUDA runtime, cuBLAS.
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
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


def extra_memory_bytes(device: torch.device, run: Callable[[], object]) -> int | None:
    """How far a call's peak is above what was in use before it, in bytes; None where no measurement can be begun.

    Args:
        device: whose memory to look at.
        run: called once. What it needs only the first time, such as libraries, counts where it is the first time.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)  # freed blocks that it keeps would be taken again unseen
    if not reset_peak_memory(device):
        return None
    before = peak_memory_bytes(device)
    run()
    return peak_memory_bytes(device) - before


def check_run_fits(config: RunConfig, vocab_size: int) -> None:
    """Refuse a run whose model or whose micro-batch exceeds the device's memory.

    Of the model, weights, gradients and AdamW's two moments are counted, all FP32; of a micro-batch its FP32 logits
    alone, batch_size x context x vocab_size.

    Raises:
        ConfigError: one does, or the device is not there.
    """
    training, device = config.training, resolve_device(config.training.device)
    shape = config.model.llama(vocab_size=vocab_size, max_positions=training.context)
    check_fits(
        f"a model of {shape.described}, in training,",
        COPIES * shape.parameters * torch.float32.itemsize,
        device,
        remedy="make it smaller",
    )
    needed, there = training.batch_size * training.context * vocab_size * 4, memory_bytes(device)
    if needed > there:
        raise _too_large(training, f"its logits alone take at least {needed // MIB:,} MiB of {there // MIB:,} MiB")


@contextmanager
def fitting_in_memory(training: TrainingConfig) -> Iterator[None]:
    """Turn what numpy, torch and CUDA raise when memory runs out inside the block into one sentence.

    Raises:
        ConfigError: memory ran out.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        raise _too_large(training, str(error).split("\n", 1)[0]) from error


def _is_out_of_memory(error: Exception) -> bool:
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or any(words in str(error) for words in OUT_OF_MEMORY)


def _too_large(training: TrainingConfig, reason: str) -> ConfigError:
    device = resolve_device(training.device).type
    return ConfigError(
        f"a micro-batch of batch_size {training.batch_size} and context {training.context} does not fit in the memory "
        f"of {device!r} ({reason}); lower one of them, grad_accumulation makes up for it"
    )

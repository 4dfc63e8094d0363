"""Peak memory, and checks that a run fits in memory.

On CUDA, the allocator's own peak. On a Linux CPU, the process's peak resident set (VmHWM of /proc/self/status), which
the kernel resets to the present size when 5 is written to /proc/self/clear_refs. It counts the interpreter, torch's
libraries and the mapped pages of the token files too; memory freed earlier but kept by the C allocator as well. Where
the reset is not allowed, the figure is the peak since the process began; where there is no /proc, ``getrusage``'s.

On a CPU the figure therefore depends on earlier work of the process: the second of two equal runs starts with memory
left by the first. It is the memory that a machine needs, and not comparable between runs.
:func:`extra_memory_bytes` is comparable: the memory of one call beyond that in use, after unreachable objects are
collected and the C allocator has returned its free memory. Pages of files that the kernel reclaims during the call
lower it.
"""

import ctypes
import gc
import platform
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from octavo.errors import ConfigError
from octavo.memory import MIB, check_fits, memory_bytes
from octavo.training.config import RunConfig, TrainingConfig
from octavo.training.precision import resolve_device

__all__ = [
    "check_run_fits",
    "extra_memory_bytes",
    "fitting_in_memory",
    "peak_memory_bytes",
    "reset_peak_memory",
]

COPIES = 4  # of each parameter: weight, gradient, two moments
# In the bare RuntimeErrors of torch: its CPU allocator on Linux and on Windows, the CUDA runtime, cuBLAS.
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
RESET_PEAK = "5"


def reset_peak_memory(device: torch.device) -> bool:
    """Reset the peak; return False if that is impossible and the peak covers the process's whole life."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
    except OSError:
        return False
    return True


def peak_memory_bytes(device: torch.device) -> int:
    """Peak since the last reset, in bytes."""
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
    """Peak of a call above the memory in use before it, in bytes; None if the peak cannot be reset.

    Args:
        device: device whose memory to measure.
        run: called once. Memory that only a first call needs, such as libraries, counts if this is the first call.
    """
    gc.collect()  # garbage collected inside the call would count as in use before it, and lower the figure
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)  # reuse of its free blocks would not show in the peak
    if not reset_peak_memory(device):
        return None
    before = peak_memory_bytes(device)
    run()
    return peak_memory_bytes(device) - before


def check_run_fits(config: RunConfig, vocab_size: int) -> None:
    """Check that a run's model and micro-batch fit in the device's memory.

    The model counts with its weights, gradients and AdamW's two moments, all FP32; a micro-batch with its FP32 logits
    alone, batch_size x context x vocab_size.

    Raises:
        ConfigError: one does not fit, or the device is not available.
    """
    training, device = config.training, resolve_device(config.training.device)
    shape = config.model.llama(vocab_size=vocab_size, max_positions=training.context)
    check_fits(
        f"a model of {shape.described}, in training,",
        COPIES * shape.parameters * torch.float32.itemsize,
        device,
        remedy="make it smaller",
    )
    needed, available = training.batch_size * training.context * vocab_size * 4, memory_bytes(device)
    if needed > available:
        raise _too_large(training, f"its logits alone take at least {needed // MIB:,} MiB of {available // MIB:,} MiB")


@contextmanager
def fitting_in_memory(training: TrainingConfig) -> Iterator[None]:
    """Convert out-of-memory errors of numpy, torch and CUDA inside the block to one ConfigError.

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
    is_memory_error = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return is_memory_error or any(words in str(error) for words in OUT_OF_MEMORY)


def _too_large(training: TrainingConfig, reason: str) -> ConfigError:
    device = resolve_device(training.device).type
    return ConfigError(
        f"a micro-batch of batch_size {training.batch_size} and context {training.context} does not fit in the memory "
        f"of {device!r} ({reason}); lower one of them and raise grad_accumulation instead"
    )

"""Where Triton's kernels are launched. Nothing here imports Triton, so that anyone may ask."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

__all__ = ["WHY_ABSENT", "multiprocessors", "on_device_of"]

_HERE = nullcontext()


def _why_absent() -> str | None:
    if find_spec("triton") is None:  # a look for the file
        return "triton is not installed"
    return "triton's kernels are written for CUDA, and this torch is built for ROCm" if torch.version.hip else None


WHY_ABSENT = _why_absent()  # None where there is a Triton; once, since no graph traces find_spec


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Launches go to the current device, which need not be the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda and x.get_device() != torch.cuda.current_device() else _HERE


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run side by side; for the interpreter, and to compile without a GPU, an H100's."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132

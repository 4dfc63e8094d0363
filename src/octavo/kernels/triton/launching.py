"""How Triton's kernels are launched, quickly. Nothing here imports Triton, so that anyone may ask.

Triton binds and describes a kernel's arguments anew for every launch, in Python: 30 µs, of which the launch itself is
three. What has been compiled once is launched here without that, so that an eager step of FP8 does not wait for Python.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.library import wrap_triton

__all__ = [
    "WHY_ABSENT",
    "allocate",
    "ceil_div",
    "launch",
    "multiprocessors",
    "next_power_of_2",
    "on_device_of",
    "tile_side",
]

_ALIGNMENT = 16  # bytes: where an address is a multiple of it, a thread may load as many at once
_INT32 = range(-(2**31), 2**31)
_KEPT_BY_INDUCTOR = {"num_warps", "num_stages"}  # of Triton's options
_STAND_INS = (FakeTensor, FunctionalTensor)
_HERE = nullcontext()
_compiled: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}


def _why_absent() -> str | None:
    if find_spec("triton") is None:  # a look for the file
        return "triton is not installed"
    return "triton's kernels are written for CUDA, and this torch is built for ROCm" if torch.version.hip else None


WHY_ABSENT = _why_absent()  # None where there is a Triton; once, since no graph traces find_spec


def launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **constants: Any) -> None:
    """``kernel[grid](*arguments, **constants)``.

    Args:
        kernel: what ``triton.jit`` made.
        grid: one to three numbers of programs.
        arguments: the parameters that are no ``tl.constexpr``, a tensor first; they stand before all others in the
            kernel's signature.
        constants: the others, and Triton's options; every launch of a kernel names them in the same order.
    """
    if _is_stand_in(arguments[0]):  # a graph is made, and the launch becomes part of it
        lost = constants.keys() - set(kernel.arg_names) - _KEPT_BY_INDUCTOR
        assert not lost, f"inductor drops {lost} without a word"
        wrap_triton(kernel)[grid](*arguments, **constants)
        return
    key = (*_traits(kernel, arguments), *constants.values())
    known = _compiled.get(key)
    if known is not None:
        made, constexprs = known
        made[(*grid, 1, 1)](*arguments, *constexprs)
        return
    made = kernel[grid](*arguments, **constants)
    if made is not None:  # the interpreter compiles nothing
        names = kernel.arg_names[len(arguments) :]
        _compiled[key] = made, tuple(constants[name] for name in names)


def _traits(kernel: object, arguments: tuple[Any, ...]) -> list[object]:
    """What the machine code of a kernel for these arguments depends on: Triton compiles anew where it differs."""
    traits: list[object] = [id(kernel)]
    for argument in arguments:
        if type(argument) is int:
            traits.append((argument == 1, argument % _ALIGNMENT == 0, argument in _INT32))
        elif isinstance(argument, Tensor):
            traits += (argument.get_device(), argument.dtype, argument.data_ptr() % _ALIGNMENT == 0)
        elif argument is None or type(argument) is float:
            traits.append(type(argument))
        else:  # a tensor descriptor
            traits += (argument.base.get_device(), argument.base.dtype, *argument.block_shape)
    return traits


def allocate(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory on a tensor's device that holds nothing yet; inductor would fill an empty [], but not a view of [1].

    Example:
        >>> allocate(torch.ones(2), (), torch.int64).shape
        torch.Size([])
    """
    if len(shape) or not _is_stand_in(like):
        return like.new_empty(shape, dtype=dtype)
    return like.new_empty(1, dtype=dtype).view(())


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Launches go to the current device, which need not be the tensor's; a graph's go where its tensors are."""
    elsewhere = x.is_cuda and not _is_stand_in(x) and x.get_device() != torch.cuda.current_device()
    return torch.cuda.device(x.device) if elsewhere else _HERE


def _is_stand_in(x: object) -> bool:
    """Whether a tracer holds this in a tensor's place; a mode that only watches has tensors with memory."""
    return isinstance(x, _STAND_INS)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run side by side; for the interpreter, and to compile without a GPU, an H100's."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def ceil_div(a: int, b: int) -> int:
    """⌈a / b⌉. Triton's own takes three microseconds outside of a kernel.

    Example:
        >>> ceil_div(9, 4)
        3
    """
    return -(-a // b)


def next_power_of_2(n: int | torch.SymInt) -> int:
    """The smallest power of two that is ``n`` or more.

    Example:
        >>> next_power_of_2(1), next_power_of_2(5)
        (1, 8)
    """
    if type(n) is int:
        return 1 << (n - 1).bit_length()
    power = 1
    while power < n:  # a symbol: the graph serves all sizes of which these comparisons are true
        power *= 2
    return power


def tile_side(n: int | torch.SymInt, limit: int) -> int:
    """How much of ``n`` a tile takes: a power of two that holds it, up to a limit that is one.

    Of a symbol it is the limit, since a traced graph serves all its sizes; what lies beyond is masked.

    Example:
        >>> tile_side(5, 64), tile_side(100, 64)
        (8, 64)
    """
    return next_power_of_2(min(n, limit)) if type(n) is int else limit

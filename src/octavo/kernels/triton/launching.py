"""Fast launches of Triton kernels. Nothing here imports Triton, so every module may import this one.

Triton binds and describes a kernel's arguments anew for every launch, in Python: 30 µs, of which the launch itself is
three. A kernel that is compiled already is launched here without that, so that an eager FP8 step does not wait for
Python. Compiled kernels are found by a key that distinguishes at least what Triton compiles anew for, and run as code
that inductor generates runs them.
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
_KEPT_BY_INDUCTOR = {"num_warps", "num_stages"}  # of Triton's options; it drops others silently
# Tensors of a tracer, which have no memory; those of a mode that only observes have it.
_STAND_INS = (FakeTensor, FunctionalTensor)
_HERE = nullcontext()
# By key: the compiled kernel, its compile-time arguments, which Triton's launcher expects again, and Triton's settings.
_compiled: dict[tuple[object, ...], tuple[Any, tuple[object, ...], Any]] = {}


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
        arguments: the parameters that are not ``tl.constexpr``, a tensor or a descriptor of one first; they stand
            before all others in the kernel's signature. All tensors are on one device, the current one.
        constants: the others, and Triton's options; every launch of a kernel names them in the same order, since the
            key holds their values alone.
    """
    first: Any = arguments[0]
    if isinstance(first, _STAND_INS):  # a graph is made, and the launch becomes part of it
        lost = constants.keys() - set(kernel.arg_names) - _KEPT_BY_INDUCTOR
        assert not lost, f"inductor drops {lost} without a word"
        wrap_triton(kernel)[grid](*arguments, **constants)
        return
    device = (first if isinstance(first, Tensor) else first.base).get_device()
    key = (id(kernel), device, *_traits(arguments), *constants.values())
    known = _compiled.get(key)
    if known is None:
        _compile(key, kernel, grid, arguments, constants)
        return
    compiled, constexprs, settings = known
    grid = (*grid, 1, 1)
    if settings.launch_enter_hook.calls or settings.launch_exit_hook.calls:  # a profiler's
        compiled[grid](*arguments, *constexprs)
        return
    stream = torch._C._cuda_getCurrentRawStream(device)  # noqa: SLF001 (Triton's own way to it is four calls)
    compiled.run(
        *grid[:3], stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments, *constexprs
    )


def _compile(
    key: tuple[object, ...], kernel: Any, grid: tuple[int, ...], arguments: tuple[object, ...], constants: Any
) -> None:
    """Launch by Triton, and keep what it has compiled."""
    compiled = kernel[grid](*arguments, **constants)
    if compiled is not None:  # the interpreter compiles nothing
        from triton import knobs

        names = kernel.arg_names[len(arguments) :]
        _compiled[key] = compiled, tuple(constants[name] for name in names), knobs.runtime


def _traits(arguments: tuple[Any, ...]) -> list[object]:
    """The properties of arguments on which a kernel's machine code depends: Triton compiles anew where they differ."""
    traits: list[object] = []
    for argument in arguments:
        kind = type(argument)
        if kind is int:
            # 1 becomes a constant; a multiple of 16 lets loads be vectors; larger numbers are passed as int64.
            traits.append((argument == 1, argument % _ALIGNMENT == 0, argument in _INT32))
        elif argument is None or kind is float:
            traits.append(kind)
        elif isinstance(argument, Tensor):
            traits += (argument.dtype, argument.data_ptr() % _ALIGNMENT == 0)
        else:  # a tensor descriptor
            traits += (argument.base.dtype, *argument.block_shape)
    return traits


def allocate(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialized memory on a tensor's device. Inductor would fill an empty [], but not a view of [1].

    Example:
        >>> allocate(torch.ones(2), (), torch.int64).shape
        torch.Size([])
    """
    if len(shape) or not isinstance(like, _STAND_INS):
        return like.new_empty(shape, dtype=dtype)
    return like.new_empty(1, dtype=dtype).view(())


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Context in which launches go to a tensor's device, and not to the current one, if that is another.

    A graph launches on its tensors' device by itself.
    """
    elsewhere = x.is_cuda and not isinstance(x, _STAND_INS) and x.get_device() != torch.cuda.current_device()
    return torch.cuda.device(x.device) if elsewhere else _HERE


@cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors; an H100's for the interpreter, and where kernels are compiled without a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def ceil_div(a: int, b: int) -> int:
    """⌈a / b⌉. Triton's ``cdiv`` takes three microseconds outside of a kernel.

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


def tile_side(n: int | torch.SymInt, limit: int, *, least: int = 1) -> int:
    """A tile's extent along a dimension of ``n``: the next power of two, from ``least`` to ``limit``, powers of two.

    For a symbolic size it is the limit, since a traced graph serves all sizes; elements beyond ``n`` are masked.

    Example:
        >>> tile_side(5, 64), tile_side(100, 64), tile_side(5, 64, least=16)
        (8, 64, 16)
    """
    return max(least, next_power_of_2(min(n, limit))) if type(n) is int else limit

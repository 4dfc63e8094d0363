"""Detection of tracing, and workarounds that ``torch.compile`` needs."""

import sys
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode

from octavo.errors import BackendError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "PLAIN_TENSORS",
    "finished",
    "inline_kernels",
    "is_distributed",
    "is_plain",
    "is_traced",
    "is_tracing",
    "sources",
    "unaliased",
]

PLAIN_TENSORS = (Tensor, torch.nn.Parameter)


def sources() -> str:
    """SHA-256 of the sources that a launch depends on; an argument of operators that torch traces record."""
    return _digest()


@cache
def _digest() -> str:
    package = files("octavo")
    folders = (*(package / "kernels" / part for part in ("", "backends", "triton")), package / "numerics")
    paths = [file for folder in folders for file in folder.iterdir() if file.name[-3:] == ".py"]
    paths.append(package / "formats.py")
    return sha256(b"".join(file.read_bytes() for file in sorted(paths, key=str))).hexdigest()


# As torch.compiler.assume_constant_result does, which imports torch._dynamo: a graph holds the digest as a constant.
sources._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001


def unaliased(result: Tensor) -> Tensor:
    """Return a tensor that aliases no other in a traced graph, for an ``autograd.Function``'s forward.

    An operation that changes nothing, such as ``.to()`` to the same dtype, gives a second name to one tensor. Of
    several names torch 2.11 gives the gradient to the last, and zeros to the first without an error (pytorch issue
    180642).

    Example:
        >>> x = torch.ones(2)
        >>> unaliased(x) is x
        True
    """
    return result.view_as(result) if torch.compiler.is_compiling() else result


def inline_kernels(operator: str, run: Callable[..., Any]) -> None:
    """Let ``torch.compile`` trace into an operator on a GPU, so that compiled code launches the kernels directly.

    A call of an operator costs a compiled graph the Python that runs it, several times the cost of its launches.
    An exported graph keeps the operator, which does not depend on the implementation.

    Torch caches compiled code on disk, keyed by the operators' arguments. So the last argument is :func:`sources`:
    after an update of octavo the code compiled from the old kernels is not found. A program
    that was exported before carries the digest of its time; compiled again, it may find the code compiled then.

    Args:
        operator: its name, such as "octavo::cast"; its first argument is a tensor.
        run: its implementation on CUDA, with its arguments; traceable.
    """

    def decompose(mode: Any, call: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args[0].is_cuda or torch.compiler.is_exporting():
            return mode.__torch_dispatch__(call, types, args, kwargs)
        with mode:
            return run(*args, **kwargs)

    torch.library.register_torch_dispatch(operator, FunctionalTensorMode, decompose)


def is_traced(*tensors: Tensor | None) -> bool:
    """Return whether a tensor is fake or operations are traced: it has no address then, and operators are called.

    Raises:
        BackendError: ``torch.jit.trace`` is running; it takes sizes for tensors and sees no kernel calls.
    """
    if is_tracing():
        return True
    if torch._C._is_tracing():  # noqa: SLF001 (torch.jit.is_tracing is two Python frames more)
        raise BackendError(
            "torch.jit.trace, which TensorBoard's add_graph calls, cannot record octavo's FP8 kernels; record the "
            "model with torch.export.export, or inside octavo.autocast(enabled=False), which runs it in high precision"
        )
    for x in tensors:  # noqa: SIM110 (a generator would cost every eager cast and GEMM another Python frame)
        if x is not None and not is_plain(x):
            return True
    return False


def is_tracing() -> bool:
    """Return whether a compiler or a dispatch mode such as ``make_fx``'s traces operations: sizes may be symbols."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0  # noqa: SLF001


def is_plain(x: Tensor) -> bool:
    """Return whether a tensor is neither of a subclass nor wrapped by torch.func."""
    return type(x) in PLAIN_TENSORS and not torch._C._functorch.is_functorch_wrapped_tensor(x)  # noqa: SLF001


def is_distributed(x: object) -> "TypeGuard[DTensor]":
    """Return whether a tensor is a DTensor, without the import of its module."""
    if type(x) in PLAIN_TENSORS:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def finished(x: Tensor) -> Tensor:
    """Return a tensor that no collective is writing to any more."""
    return x if type(x) in PLAIN_TENSORS else getattr(x, "trigger_wait", lambda: x)()

"""Detection of tracing, and workarounds that ``torch.compile`` needs."""

from collections.abc import Callable
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode

from octavo.errors import BackendError

__all__ = ["PLAIN_TENSORS", "inline_kernels", "is_plain", "is_recorded", "is_traced", "sources", "unaliased"]

PLAIN_TENSORS = (Tensor, torch.nn.Parameter)


def sources() -> str:
    """SHA-256 of all that decides about a launch; operators that torch sees through take it, see inline_kernels."""
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
    several names torch 2.11 hands the gradient to the last, and the first gets zeros without a word (pytorch issue
    180642).

    Example:
        >>> x = torch.ones(2)
        >>> unaliased(x) is x
        True
    """
    return result.view_as(result) if torch.compiler.is_compiling() else result


def inline_kernels(operator: str, run: Callable[..., Any]) -> None:
    """Let ``torch.compile`` see what an operator does on a GPU: its code then launches the kernels by itself.

    A call of an operator costs a compiled graph the Python that runs it, several times what its launches do. An
    exported graph keeps the operator, which says what is meant and not how.

    Torch keeps what it compiled on disk and knows it again by the operators' arguments. So the last one is
    :func:`sources`: after an update of octavo what ``torch.compile`` made of the old kernels is not found. A program
    that was exported before carries the digest of its time; compiled again, it may find what was made of it then.

    Args:
        operator: its name, such as "octavo::cast"; its first argument is a tensor.
        run: what it does on CUDA: of its arguments, and traceable.
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
        BackendError: ``torch.jit.trace`` watches, to which sizes are tensors, and no kernel's call is an operation.
    """
    if is_recorded():
        return True
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise BackendError(
            "torch.jit.trace, which TensorBoard's add_graph calls, cannot record octavo's FP8 kernels; record the "
            "model with torch.export.export, or inside octavo.autocast(enabled=False), which runs it in high precision"
        )
    return not all(x is None or is_plain(x) for x in tensors)


def is_recorded() -> bool:
    """Return whether a compiler or a dispatch mode such as ``make_fx``'s records operations: sizes may be symbols."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0  # noqa: SLF001


def is_plain(x: Tensor) -> bool:
    """Return whether a tensor is neither of a subclass nor wrapped by torch.func."""
    return type(x) in PLAIN_TENSORS and not torch._C._functorch.is_functorch_wrapped_tensor(x)  # noqa: SLF001

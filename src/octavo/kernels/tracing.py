"""Whether an operation is run or traced, and what ``torch.compile`` must be told where it does not see for itself."""

import torch
from torch import Tensor

__all__ = ["PLAIN_TENSORS", "distinct", "is_plain", "is_traced"]

PLAIN_TENSORS = (Tensor, torch.nn.Parameter)


def distinct(result: Tensor) -> Tensor:
    """What an ``autograd.Function`` returns from forward, with a name of its own in a traced graph.

    An operation that changes nothing, such as ``.to()`` to the same dtype, gives a second name to one tensor. Of
    several names torch 2.11 hands the gradient to the last, and the first gets zeros without a word (pytorch issue
    180642).

    Example:
        >>> x = torch.ones(2)
        >>> distinct(x) is x
        True
    """
    return result.view_as(result) if torch.compiler.is_compiling() else result


def is_traced(*tensors: Tensor | None) -> bool:
    """Whether one is a stand-in, or operations are watched: then there is no address, and operators are called."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:  # noqa: SLF001
        return True
    return not all(x is None or is_plain(x) for x in tensors)


def is_plain(x: Tensor) -> bool:
    """Whether a tensor is no subclass's and none that torch.func wraps."""
    return type(x) in PLAIN_TENSORS and not torch._C._functorch.is_functorch_wrapped_tensor(x)  # noqa: SLF001

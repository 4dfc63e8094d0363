"""What ``torch.compile`` must be told where it does not see for itself."""

import torch
from torch import Tensor

__all__ = ["distinct"]


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

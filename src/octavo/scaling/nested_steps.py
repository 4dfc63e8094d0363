"""Optimizer steps that another optimizer's step makes, and forwards that a closure makes.

Wrappers such as ``torch.distributed.optim.ZeroRedundancyOptimizer`` are optimizers themselves, and call the step of an
optimizer over all or some of their parameters: torch reports the end of both. Only the outermost is a step of the
model; a rank whose shard holds none of its layers would otherwise reduce amaxes at another place than its peers.

torch tells of a step's begin and end, but not of one that ends in an exception, so that a count of open steps could be
wrong for good. The interpreter's frames cannot: an enclosing step is on the stack, or it is over.
"""

import sys
from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.optim.optimizer import Optimizer

__all__ = ["is_nested_step", "is_stepping"]

_STEP = Optimizer.profile_hook_step(lambda _: None).__code__  # of the function that torch puts around every step


def is_nested_step(optimizer: Optimizer) -> bool:
    """Return whether another optimizer that holds all parameters of this one is calling its step.

    A closure may train another model with an optimizer of its own: that step is not part of the enclosing one.
    """
    held = _parameters(optimizer)
    return any(other is not optimizer and held <= _parameters(other) for other in _running_steps())


def is_stepping(parameters: Iterable[Tensor]) -> bool:
    """Return whether the step of an optimizer that holds some of the parameters is running."""
    sought = {id(parameter) for parameter in parameters}
    return any(sought & _parameters(optimizer) for optimizer in _running_steps())


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _running_steps() -> Iterator[Optimizer]:
    """The optimizers whose steps are running on this thread, the innermost first."""
    frame = sys._getframe()  # noqa: SLF001 (the documented way to the caller's frame)
    while frame.f_back is not None:
        frame = frame.f_back
        code = frame.f_code
        # By name: torch.compile runs the function, and its parts, as code objects of its own.
        if code.co_filename == _STEP.co_filename and _STEP.co_name in code.co_name:
            yield frame.f_locals["args"][0]

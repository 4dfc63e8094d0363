"""Optimizer steps that another optimizer's step makes, and forwards that a closure makes.

Wrappers such as ``torch.distributed.optim.ZeroRedundancyOptimizer`` are optimizers themselves, and call the step of an
optimizer over all or some of their parameters: torch reports the end of both. So it does of a class's step and of the
``super().step()`` in it, but only once an optimizer of the parent class exists. Only the outermost is a step of the
model; a rank whose shard holds none of its layers would otherwise reduce amaxes at another place than its peers.

torch tells of a step's begin and end, but not of one that ends in an exception, so that a count of open steps could be
wrong for good. The interpreter's frames cannot: an enclosing step is on the stack, or it is over.
"""

import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor
from torch.optim.optimizer import Optimizer

__all__ = ["is_nested_step", "is_stepping"]

_STEP = Optimizer.profile_hook_step(lambda _: None).__code__  # of the function that torch puts around every step


def is_nested_step(optimizer: Optimizer) -> bool:
    """Return whether the step of an optimizer that holds all parameters of this one is calling the step that ends.

    A closure may train another model with an optimizer of its own: that step is not part of the enclosing one.
    """
    steps, held = [*_running_steps()], _parameters(optimizer)
    return any(step.is_other(steps[0]) and held <= _parameters(step.optimizer) for step in steps[1:])


def is_stepping(parameters: Iterable[Tensor]) -> bool:
    """Return whether the step of an optimizer that holds some of the parameters is running."""
    sought = {id(parameter) for parameter in parameters}
    return any(sought & _parameters(step.optimizer) for step in _running_steps())


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


class _Step(NamedTuple):
    """A frame of a running step; torch.compile divides one step into several, which may not know their function."""

    optimizer: Optimizer
    function: object

    def is_other(self, step: "_Step") -> bool:
        """Return whether the frames are of two steps."""
        known = self.function is not None and step.function is not None
        return self.optimizer is not step.optimizer or (known and self.function is not step.function)


def _running_steps() -> Iterator[_Step]:
    """Frames of the steps that are running on this thread, the innermost first."""
    frame = sys._getframe()  # noqa: SLF001 (the documented way to the caller's frame)
    while frame.f_back is not None:
        frame = frame.f_back
        code = frame.f_code
        # By name: torch.compile runs the function, and its parts, as code objects of its own.
        if code.co_filename == _STEP.co_filename and _STEP.co_name in code.co_name:
            yield _Step(frame.f_locals["args"][0], frame.f_locals.get("func"))

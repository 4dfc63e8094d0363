"""Jumps of all gradients at chosen steps: ``gradient_jumps = [[0.5, 16], [0.6, 0]]``.

From a fraction of the run on, the loss is multiplied by a power of two before the backward pass, and the gradients of
the parameters are divided by it after it. Step s of S has the power of the last jump whose fraction is at most
(s − 1) / S, and before the first jump 0.

Powers of two do not round. So a run that casts nothing, or whose scales come from the tensor at hand, does not change
by a bit, and delayed scales meet gradients that their history does not know.
"""

from collections.abc import Sequence

import torch
from torch import nn

from octavo.errors import ConfigError

__all__ = ["Jump", "check_jumps", "divide_gradients", "jump_at"]

Jump = tuple[float, int]
MOST_POWER = 64  # FP32 and BF16 have 127 binades above 1


def check_jumps(jumps: Sequence[Jump]) -> None:
    """Check the jumps of a run.

    Raises:
        ConfigError: fractions that do not increase from above 0 to below 1, or a power beyond ±64.
    """
    starts = [start for start, _ in jumps]
    if not all(0 < start < 1 for start in starts) or starts != sorted(set(starts)):
        raise ConfigError(
            "the fractions of training.gradient_jumps must increase, each above 0 and below 1, not "
            f"{', '.join(map(str, starts))}"
        )
    for _, power in jumps:
        if not -MOST_POWER <= power <= MOST_POWER:
            raise ConfigError(f"a power of training.gradient_jumps must be -{MOST_POWER} to {MOST_POWER}, not {power}")


def jump_at(jumps: Sequence[Jump], step: int, *, steps: int) -> float:
    """Return the factor of the gradients of a step, 1 for the first.

    Example:
        >>> [jump_at(((0.5, 4), (0.75, 0)), step, steps=4) for step in (1, 2, 3, 4)]
        [1.0, 1.0, 16.0, 1.0]
    """
    done = (step - 1) / steps
    return 2.0 ** next((power for start, power in reversed(jumps) if start <= done), 0)


@torch.no_grad()
def divide_gradients(model: nn.Module, factor: float) -> None:
    """Divide the gradients of all parameters by a factor."""
    for parameter in model.parameters():
        if factor != 1 and parameter.grad is not None:
            parameter.grad.div_(factor)

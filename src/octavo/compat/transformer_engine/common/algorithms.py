"""Custom functions of ``DelayedScaling`` from a window of amaxes to the next scale.

A function is called for one role of one layer, with Transformer Engine's layout of the history:

| argument       | shape  | content                                                                               |
|----------------|--------|---------------------------------------------------------------------------------------|
| `amax_history` | [L, 1] | row 0 the step just finished, then from the oldest to the one before it; 0 is no amax |
| `amax`         | [1]    | of the window                                                                         |
| `scale`        | [1]    | current scale; multiplies before the cast; 1 before the first step                    |
| `fp8_max`      | []     | the format's largest value                                                            |

octavo stores amaxes instead of scales, so a scale s that the function returns is stored as the amax
fp8_max / 2^margin / s, which gives s again within one rounding of float32, and exactly for a power of two.
An amax or a scale that is not positive and finite does not change the scale.

Reference: Transformer Engine's documentation, "Common API", ``DelayedScaling``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from octavo.errors import ConfigError

__all__ = ["Algorithms"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithms:
    """Statistic of a history (:class:`octavo.recipes.History`) computed by such functions.

    Attributes:
        amax: function of the amax, or "max" or "most_recent".
        scale: function of the scale, or None for fp8_max / amax / 2^margin.
        maxima: largest value of each role's format.
        margin: binades left free.
        recipe: argument of the scale function.

    Example:
        >>> mean = Algorithms(amax=lambda history: history.mean(), scale=None, maxima=(448.0,) * 3, margin=0)
        >>> mean(torch.tensor([[2.0, 4.0]] * 3), torch.zeros(3)).tolist()
        [3.0, 3.0, 3.0]
    """

    amax: Callable[..., Any] | str
    scale: Callable[..., Any] | None
    maxima: tuple[float, ...]
    margin: int
    recipe: object = field(default=None, compare=False, repr=False)

    def __call__(self, window: Tensor, amaxes: Tensor) -> Tensor:
        """Next amaxes [roles] from a window [roles, L], newest first, and the current amaxes [roles]."""
        rows = zip(window.clamp(min=0), amaxes, self.maxima, strict=True)
        return torch.stack([self._role(*row) for row in rows])

    def _role(self, window: Tensor, current: Tensor, maximum: float) -> Tensor:
        history = torch.cat([window[:1], window[1:].flip(0)])[:, None]
        amax = self._amax(history)
        if self.scale is None:
            return amax
        largest = torch.full((), maximum, device=window.device)
        old = torch.where(current > 0, largest / 2**self.margin / current, 1.0)
        scale = _one("scaling_factor_compute_algo", self.scale(amax[None], old[None], largest, self.recipe))
        return torch.where((amax > 0) & (scale > 0), largest / 2**self.margin / scale, 0.0)

    def _amax(self, history: Tensor) -> Tensor:
        match self.amax:
            case "max":
                return history.amax()
            case "most_recent":
                return history[0, 0]
        assert callable(self.amax)
        return _one("amax_compute_algo", self.amax(history.clone()))


def _one(name: str, value: Any) -> Tensor:
    """Number that a function returned, float32 []; 0 for one that is not positive and finite."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        shown = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ConfigError(f"{name} must return a tensor with one number for the history [L, 1], not {shown}")
    number = value.detach().float().reshape(())
    return torch.where(number.isfinite() & (number > 0), number, 0.0)

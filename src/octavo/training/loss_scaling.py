"""Loss scaling: gradients of loss · scale, so that small ones survive FP16, divided by the scale before their use.

FP16 has 40 binades and gradients reach below them. BF16 and FP32 have the exponents of FP32 and need none of this, and
neither does dynamic FP8: it measures each gradient, so a power of two in front of the loss moves the scales and leaves
the codes as they are.

``torch.amp.GradScaler`` does the work. This class adds what it leaves out: bounds of the scale (one number for both
makes it static), an answer whether the gradients were finite, and a state of two numbers.

References: Micikevicius et al., arXiv 1710.03740, section 3.2; torch's documentation, "Automatic Mixed Precision".
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from octavo.errors import CheckpointError, ConfigError

__all__ = ["LossScaler"]

GROWTH, BACKOFF = 2.0, 0.5


class LossScaler:
    """Scales a loss, and leaves out the steps whose gradients are not finite.

    Args:
        scale: "dynamic", or one number for all steps. A power of two rounds nothing.
        initial: a dynamic scale's first value.
        growth_interval: a dynamic scale doubles after so many finite steps; it halves after one that is not.
        floor: it stays at least that.
        ceiling: it stays at most that; None is no limit.
        device: of the gradients.

    Raises:
        ConfigError: a value out of range.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> scaler = LossScaler()
        >>> scaler.scale(weight.sum()).backward()
        >>> scaler.unscale_(optimizer), weight.grad.tolist()
        (True, [1.0, 1.0])
        >>> scaler.step(optimizer), weight.tolist()
        (True, [0.5, 0.5])
        >>> scaler.update()
    """

    def __init__(
        self,
        scale: str | float = "dynamic",
        *,
        initial: float = 2.0**16,
        growth_interval: int = 2000,
        floor: float = 1.0,
        ceiling: float | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if scale != "dynamic":
            initial = floor = ceiling = _positive("a static loss scale", scale)
        self.floor = _positive("floor", floor)
        self.ceiling = math.inf if ceiling is None else _positive("ceiling", ceiling)
        if not self.floor <= _positive("initial", initial) <= self.ceiling:
            raise ConfigError(f"initial must be between floor {floor} and ceiling {ceiling}, not {initial}")
        if isinstance(growth_interval, bool) or growth_interval < 1:
            raise ConfigError(f"growth_interval must be a whole number of at least 1, not {growth_interval!r}")
        self._scaler = torch.amp.GradScaler(
            torch.device(device).type,
            init_scale=initial,
            growth_factor=GROWTH,
            backoff_factor=BACKOFF,
            growth_interval=growth_interval,
        )
        self._finite: dict[int, bool] = {}  # of the optimizers whose gradients are divided already, until update

    @property
    def value(self) -> float:
        """The scale now."""
        return self._scaler.get_scale()

    def scale(self, loss: Tensor) -> Tensor:
        """``loss · scale``, to call ``backward`` on; a sum of micro-batches takes the same scale for each."""
        return self._scaler.scale(loss)

    def unscale_(self, optimizer: Optimizer) -> bool:
        """Divide the gradients of the optimizer's parameters by the scale, once a step: clip them after this.

        Returns:
            Whether all of them are finite.

        Raises:
            ConfigError: their parameters are FP16; keep those in FP32 and compute in FP16 by ``torch.autocast``.
        """
        if id(optimizer) not in self._finite:
            if any(gradient.dtype is torch.float16 for gradient in _gradients(optimizer)):
                raise ConfigError(
                    "gradients of FP16 parameters cannot be divided by the loss scale without losing small ones; keep "
                    "the parameters in FP32 and compute in FP16 by torch.autocast"
                )
            self._scaler.unscale_(optimizer)
            self._finite[id(optimizer)] = all(bool(gradient.isfinite().all()) for gradient in _gradients(optimizer))
        return self._finite[id(optimizer)]

    def step(self, optimizer: Optimizer) -> bool:
        """``optimizer.step()`` if its gradients are finite; they are divided by the scale first if they are not yet.

        Returns:
            Whether the step was made.
        """
        finite = self.unscale_(optimizer)
        self._scaler.step(optimizer)
        return finite

    def update(self) -> None:
        """Set the next step's scale; once after all optimizers' steps."""
        self._scaler.update()
        self._finite.clear()
        bounded = min(max(self.value, self.floor), self.ceiling)
        if bounded != self.value:
            self._scaler.update(bounded)

    def state_dict(self) -> dict[str, float]:
        """The scale, and the finite steps since it last changed."""
        state = self._scaler.state_dict()
        return {"scale": state["scale"], "clean_steps": state["_growth_tracker"]}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on as :meth:`state_dict` left off.

        Raises:
            CheckpointError: other keys, or values that no state has.
        """
        if state.keys() != {"scale", "clean_steps"}:
            raise CheckpointError(f"a loss scaler's state is scale and clean_steps, not {sorted(state)}")
        scale, clean_steps = state["scale"], state["clean_steps"]
        if not self.floor <= scale <= self.ceiling or not math.isfinite(scale) or clean_steps < 0:
            raise CheckpointError(
                f"a loss scale of {scale} after {clean_steps} steps does not fit this scaler, which keeps it from "
                f"{self.floor} to {self.ceiling}"
            )
        own = self._scaler.state_dict()
        self._scaler.load_state_dict(own | {"scale": float(scale), "_growth_tracker": int(clean_steps)})


def _gradients(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter.grad


def _positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a positive number, not {value!r}")
    return float(value)

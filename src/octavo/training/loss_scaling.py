"""Loss scaling: gradients of loss · scale, so that small ones survive FP16, divided by the scale before their use.

FP16 has 40 binades and gradients reach below them. BF16 and FP32 have the exponents of FP32 and need none of this, and
neither does dynamic FP8: it measures each gradient, so a power of two in front of the loss moves the scales and leaves
the codes as they are.

``torch.amp.GradScaler`` does the work. This class adds what it leaves out: bounds of the scale (one number for both
makes it static), an answer whether the gradients are finite once they are divided, and a state of two numbers.

References: Micikevicius et al., arXiv 1710.03740, section 3.2; torch's documentation, "Automatic Mixed Precision".
"""

import math
from collections.abc import Iterator, Mapping
from typing import TypeGuard

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
        ConfigError: a value out of range, or CUDA is asked for and there is none.

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
        initial = _positive("initial", initial)
        if not self.floor <= initial <= self.ceiling:
            raise ConfigError(f"initial must be between floor {floor} and ceiling {ceiling}, not {initial}")
        if not _is_whole(growth_interval) or growth_interval < 1:
            raise ConfigError(f"growth_interval must be a whole number of at least 1, not {growth_interval!r}")
        kind = torch.device(device).type
        if kind == "cuda" and not torch.cuda.is_available():
            raise ConfigError("a loss scaler for 'cuda' needs a CUDA device, and torch sees none; use device='cpu'")
        self.growth_interval = growth_interval
        self._scaler = torch.amp.GradScaler(
            kind,
            init_scale=initial,
            growth_factor=GROWTH,
            backoff_factor=BACKOFF,
            growth_interval=growth_interval,
        )
        self._has_scaled = False
        self._finite: dict[int, bool] = {}  # of the optimizers whose gradients are divided already, until update

    @property
    def value(self) -> float:
        """The scale now."""
        return self._scaler.get_scale()

    def scale(self, loss: Tensor) -> Tensor:
        """``loss · scale``, to call ``backward`` on; a sum of micro-batches takes the same scale for each."""
        self._has_scaled = True
        return self._scaler.scale(loss)

    def unscale_(self, optimizer: Optimizer) -> bool:
        """Divide the gradients of the optimizer's parameters by the scale, once a step: clip them after this.

        Returns:
            Whether all of them are finite.

        Raises:
            ConfigError: there are none, or their parameters are FP16; keep those in FP32 and compute in FP16 by
                ``torch.autocast``.
        """
        if id(optimizer) not in self._finite:
            dtypes = {gradient.dtype for gradient in _gradients(optimizer)}
            if torch.float16 in dtypes:
                raise ConfigError(
                    "gradients of FP16 parameters cannot be divided by the loss scale without losing small ones; keep "
                    "the parameters in FP32 and compute in FP16 by torch.autocast"
                )
            if not dtypes or not self._has_scaled:
                raise ConfigError("there is no gradient of a scaled loss; call scale(loss).backward() first")
            self._scaler.unscale_(optimizer)
            self._finite[id(optimizer)] = all(bool(gradient.isfinite().all()) for gradient in _gradients(optimizer))
        return self._finite[id(optimizer)]

    def step(self, optimizer: Optimizer) -> bool:
        """``optimizer.step()`` if its gradients are finite; they are divided by the scale first if they are not yet.

        Returns:
            Whether the step was made.
        """
        finite = self.unscale_(optimizer)
        if finite:
            self._scaler.step(optimizer)
        return finite

    def update(self) -> None:
        """Set the next step's scale, once after all optimizers' steps, or after ``unscale_`` where none is made.

        Raises:
            ConfigError: neither was called since the last time.
        """
        if not self._finite:
            raise ConfigError("a loss scale is updated after unscale_(optimizer) or step(optimizer); call one first")
        before, finite = self.value, all(self._finite.values())
        self._scaler.update()
        self._finite.clear()
        if finite:
            state = self.state_dict()
        else:  # also where only the division overflowed, which GradScaler does not look at
            state = {"scale": before * BACKOFF, "clean_steps": 0}
        self._set(min(max(state["scale"], self.floor), self.ceiling), int(state["clean_steps"]))

    def state_dict(self) -> dict[str, float]:
        """The scale, and the finite steps since it last changed."""
        state = self._scaler.state_dict()
        return {"scale": state["scale"], "clean_steps": state["_growth_tracker"]}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on as :meth:`state_dict` left off.

        Raises:
            CheckpointError: other keys, or values that no state has.
        """
        scale, clean_steps = _checked_state(state)
        if not self.floor <= scale <= self.ceiling:
            raise CheckpointError(
                f"a loss scale of {scale} does not fit this scaler, which keeps it from {self.floor} to "
                f"{self.ceiling}; give it the bounds it was saved under"
            )
        # A shorter interval than the saved one is over with the next step: GradScaler would wait for ever.
        self._set(scale, min(clean_steps, self.growth_interval - 1))

    def _set(self, scale: float, clean_steps: int) -> None:
        own = self._scaler.state_dict()
        self._scaler.load_state_dict(own | {"scale": scale, "_growth_tracker": clean_steps})


def _checked_state(state: object) -> tuple[float, int]:
    """The scale and the clean steps of a saved state."""
    if not isinstance(state, Mapping) or set(state) != {"scale", "clean_steps"}:
        given = sorted(map(str, state)) if isinstance(state, Mapping) else repr(state)
        raise CheckpointError(
            f"the state of a loss scale is scale and clean_steps, not {given}; save state_dict() of the scaler"
        )
    scale, clean_steps = state["scale"], state["clean_steps"]
    largest = torch.finfo(torch.float32).max
    if not _is_number(scale) or not 0 < scale <= largest or not _is_whole(clean_steps) or clean_steps < 0:
        raise CheckpointError(
            f"a loss scale of {scale!r} after {clean_steps!r} clean steps is none that was saved; "
            "a scale is positive and finite, steps are a whole number"
        )
    return float(scale), int(clean_steps)


def _gradients(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter.grad


def _positive(name: str, value: object) -> float:
    """``value`` as float32, which a scale is."""
    limits = torch.finfo(torch.float32)
    if not _is_number(value) or not limits.tiny <= value <= limits.max:
        raise ConfigError(f"{name} must be a positive number that FP32 holds, not {value!r}")
    return torch.tensor(value, dtype=torch.float32, device="cpu").item()


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)

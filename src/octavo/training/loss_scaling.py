"""Loss scaling: gradients of loss · scale, so that small ones survive FP16, divided by the scale before their use.

FP16 has 40 binades, and gradients reach below them. BF16 and FP32 have the exponents of FP32 and need no loss scale.
Neither does dynamic FP8: it measures each gradient, so a power of two times the loss changes the scales and not the
codes.

The class wraps ``torch.amp.GradScaler`` and adds bounds of the scale (equal ones make it static), a check that the
divided gradients are finite, and a state of two numbers.

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
    """Scaler of a loss that skips steps with non-finite gradients.

    Args:
        scale: "dynamic", or a static scale. A power of two causes no rounding.
        initial: first value of a dynamic scale.
        growth_interval: finite steps after which a dynamic scale doubles; it halves after a step that is not finite.
        floor: smallest scale.
        ceiling: largest scale; None is no limit.
        device: device of the gradients.

    Raises:
        ConfigError: a value out of range, or an unavailable device.

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
        self._finite: dict[int, bool] = {}  # by id of the optimizers already unscaled since update

    @property
    def value(self) -> float:
        """The current scale."""
        return self._scaler.get_scale()

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss · scale`` for ``backward``; all micro-batches of a step use the same scale."""
        self._has_scaled = True
        return self._scaler.scale(loss)

    def unscale_(self, optimizer: Optimizer) -> bool:
        """Divide the gradients of the optimizer's parameters by the scale, once per step; clip them afterwards.

        Returns:
            True if all of them are finite.

        Raises:
            ConfigError: there are no gradients, or their parameters are FP16; keep those in FP32 and compute in FP16
                with ``torch.autocast``.
        """
        if id(optimizer) not in self._finite:
            dtypes = {gradient.dtype for gradient in _gradients(optimizer)}
            if torch.float16 in dtypes:
                raise ConfigError(
                    "gradients of FP16 parameters cannot be divided by the loss scale without losing small ones; keep "
                    "the parameters in FP32 and compute in FP16 with torch.autocast"
                )
            if not dtypes or not self._has_scaled:
                raise ConfigError("there is no gradient of a scaled loss; call scale(loss).backward() first")
            self._scaler.unscale_(optimizer)
            self._finite[id(optimizer)] = all(bool(gradient.isfinite().all()) for gradient in _gradients(optimizer))
        return self._finite[id(optimizer)]

    def step(self, optimizer: Optimizer) -> bool:
        """Call ``optimizer.step()`` if its gradients are finite, after ``unscale_`` if that was not called yet.

        Returns:
            True if the step was taken.
        """
        finite = self.unscale_(optimizer)
        if finite:
            self._scaler.step(optimizer)
        return finite

    def update(self) -> None:
        """Set the scale of the next step, after the steps (or ``unscale_``) of all optimizers.

        Raises:
            ConfigError: neither ``step`` nor ``unscale_`` was called since the last update.
        """
        if not self._finite:
            raise ConfigError("update() must follow unscale_(optimizer) or step(optimizer); call one of them first")
        before, finite = self.value, all(self._finite.values())
        self._scaler.update()
        self._finite.clear()
        if finite:
            state = self.state_dict()
        else:  # also if only the division overflowed, which GradScaler does not check
            state = {"scale": before * BACKOFF, "clean_steps": 0}
        self._set(min(max(state["scale"], self.floor), self.ceiling), int(state["clean_steps"]))

    def state_dict(self) -> dict[str, float]:
        """Return the scale and the number of finite steps since it last changed."""
        state = self._scaler.state_dict()
        return {"scale": state["scale"], "clean_steps": state["_growth_tracker"]}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state of :meth:`state_dict`.

        Raises:
            CheckpointError: other keys, or invalid values.
        """
        scale, clean_steps = _checked_state(state)
        if not self.floor <= scale <= self.ceiling:
            raise CheckpointError(
                f"a loss scale of {scale} does not fit this scaler, which keeps it from {self.floor} to "
                f"{self.ceiling}; give it the bounds it was saved under"
            )
        # GradScaler would never grow from a count beyond its interval, which may be shorter than the saved one.
        self._set(scale, min(clean_steps, self.growth_interval - 1))

    def _set(self, scale: float, clean_steps: int) -> None:
        scaler_state = self._scaler.state_dict()
        self._scaler.load_state_dict(scaler_state | {"scale": scale, "_growth_tracker": clean_steps})


def _checked_state(state: object) -> tuple[float, int]:
    """Validate a saved state; return its scale and clean steps."""
    if not isinstance(state, Mapping) or set(state) != {"scale", "clean_steps"}:
        keys = sorted(map(str, state)) if isinstance(state, Mapping) else repr(state)
        raise CheckpointError(
            f"the state of a loss scaler must have scale and clean_steps, not {keys}; save the scaler's state_dict()"
        )
    scale, clean_steps = state["scale"], state["clean_steps"]
    largest = torch.finfo(torch.float32).max
    if not _is_number(scale) or not 0 < scale <= largest or not _is_whole(clean_steps) or clean_steps < 0:
        raise CheckpointError(
            f"a loss scale of {scale!r} after {clean_steps!r} clean steps is not a saved state; "
            "a scale is positive and finite, steps are a whole number"
        )
    return float(scale), int(clean_steps)


def _gradients(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter.grad


def _positive(name: str, value: object) -> float:
    """Round ``value`` to FP32, the dtype of a scale."""
    limits = torch.finfo(torch.float32)
    if not _is_number(value) or not limits.tiny <= value <= limits.max:
        raise ConfigError(f"{name} must be a positive number in the range of FP32, not {value!r}")
    return torch.tensor(value, dtype=torch.float32, device="cpu").item()


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)

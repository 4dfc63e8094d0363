"""Steps whose gradients overflowed under a dynamic loss scale, as ``torch.amp.GradScaler`` absorbs them.

The scaler skips the optimizer's step and lowers the scale: the weights stay unchanged, and nothing is wrong. An
overflow is detected by one of three signs: the optimizer's step was not called; a fused optimizer, which skips the
update itself, received a set ``found_inf``; or the loss scale recorded by the loop decreased.
"""

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["Overflows"]

MAX_LINES = 1000


class Overflows:
    """Collects lines of the kind "overflow", as ``octavo train`` writes them.

    A line's ``loss_scale`` is the scale that was too large, None if the loop does not record it. A step with a
    non-finite loss is not an overflow, since the loss scale is applied after the loss.

    Args:
        optimizer: the optimizer to watch; None to follow the loss scale alone.

    Attributes:
        lines: the newest lines.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.optimizer = optimizer
        self.lines: deque[dict[str, Any]] = deque(maxlen=MAX_LINES)
        self._steps_taken: list[Tensor | None] | None = None  # ``found_inf`` of each optimizer step
        self._unread: list[tuple[int, Tensor]] = []
        self._scale = -math.inf

    @contextmanager
    def during_step(self) -> Iterator[None]:
        """Record the optimizer's steps."""
        if self.optimizer is None:
            yield
            return
        found_infs: list[Tensor | None] = []
        handle = self.optimizer.register_step_post_hook(lambda it, *_: found_infs.append(vars(it).get("found_inf")))
        try:
            yield
        finally:
            handle.remove()
        self._steps_taken = found_infs

    def note(self, step: int, values: dict[str, float]) -> None:
        """Check the finished step with the values that the loop recorded, without waiting for a device."""
        before, now = self._scale, values.get("loss_scale", self._scale)
        self._scale = now
        if not math.isfinite(values.get("loss", 0.0)):
            return
        if now < before:
            self._add(step, before)
        elif self._steps_taken == []:
            self._add(step, None)
        elif self._steps_taken is not None:
            self._unread += [(step, found_inf) for found_inf in self._steps_taken if found_inf is not None]

    def read(self) -> None:
        """Add the steps that fused optimizers skipped to ``lines``; waits for their device."""
        steps, found_infs = [step for step, _ in self._unread], [found_infs for _, found_infs in self._unread]
        for step, is_set in zip(steps, torch.stack(found_infs).tolist() if found_infs else (), strict=True):
            if is_set:
                self._add(step, None)
        self._unread = []

    def _add(self, step: int, scale: float | None) -> None:
        self.lines.append({"kind": "overflow", "step": step, "loss_scale": scale})

"""Steps whose gradients overflowed under a dynamic loss scale, as ``torch.amp.GradScaler`` absorbs them.

The scaler keeps the optimizer from its step and lowers the scale: weights stay as they are, and nothing is wrong. Who
watches a loop sees either: a step in which the optimizer was not asked to step; one in which a fused optimizer, which
skips by itself, was handed a ``found_inf`` that is set; or a loss scale that the loop notes and that fell.
"""

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["Overflows"]

KEPT = 1000


class Overflows:
    """Collects lines of the kind "overflow", as ``octavo train`` writes them.

    A line's ``loss_scale`` is the one that was too large, None where the loop does not note it. A step whose loss is
    not finite is no overflow: a loss scale comes after the loss.

    Args:
        optimizer: None where only the loss scale is followed.

    Attributes:
        lines: the newest.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.optimizer = optimizer
        self.lines: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._steps_taken: list[Tensor | None] | None = None  # what the optimizer was handed in each
        self._unread: list[tuple[int, Tensor]] = []
        self._scale = -math.inf

    @contextmanager
    def during_step(self) -> Iterator[None]:
        """Count what the optimizer does."""
        if self.optimizer is None:
            yield
            return
        taken: list[Tensor | None] = []
        handle = self.optimizer.register_step_post_hook(lambda it, *_: taken.append(vars(it).get("found_inf")))
        try:
            yield
        finally:
            handle.remove()
        self._steps_taken = taken

    def note(self, step: int, values: dict[str, float]) -> None:
        """Judge the step that ended, of which the loop noted these values; waits for no device."""
        before, now = self._scale, values.get("loss_scale", self._scale)
        self._scale = now
        if not math.isfinite(values.get("loss", 0.0)):
            return
        if now < before:
            self._add(step, before)
        elif self._steps_taken == []:
            self._add(step, None)
        elif self._steps_taken is not None:
            self._unread += [(step, found) for found in self._steps_taken if found is not None]

    def read(self) -> None:
        """Let ``lines`` hold what fused optimizers skipped, too; waits for their device."""
        steps, found = [step for step, _ in self._unread], [found for _, found in self._unread]
        for step, is_set in zip(steps, torch.stack(found).tolist() if found else (), strict=True):
            if is_set:
                self._add(step, None)
        self._unread = []

    def _add(self, step: int, scale: float | None) -> None:
        self.lines.append({"kind": "overflow", "step": step, "loss_scale": scale})

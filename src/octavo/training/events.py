"""Events that a training run reports to its ``on_event`` callback."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Evaluated", "Event", "Notice", "OnEvent", "Saved", "StepDone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """A finished optimizer update.

    Attributes:
        step: finished updates, 1 after the first.
        steps: updates of the whole run.
        loss: mean training loss of the update's tokens in nats, before the update.
        lr: learning rate of the update.
        grad_norm: global norm of the gradients before clipping.
        tokens_per_second: throughput of this update.
    """

    step: int
    steps: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """An evaluation on the validation split after ``step`` updates."""

    step: int
    steps: int
    nats: float
    perplexity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint that is complete on disk."""

    step: int
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A message for the user."""

    text: str


Event = StepDone | Evaluated | Saved | Notice
OnEvent = Callable[[Event], None]

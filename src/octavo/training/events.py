"""What a run tells whoever watches it, as it happens."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Evaluated", "Event", "Notice", "OnEvent", "Saved", "StepDone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """An optimizer update.

    Attributes:
        step: finished updates, 1 after the first.
        steps: updates of the whole run.
        loss: mean training loss of the update's tokens, in nats, before it.
        lr: its learning rate.
        grad_norm: the gradient's global norm before clipping.
        tokens_per_second: of this update alone.
    """

    step: int
    steps: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """A measurement on the validation split after ``step`` updates."""

    step: int
    steps: int
    nats: float
    perplexity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint is complete on disk."""

    step: int
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A sentence the user should see once."""

    text: str


Event = StepDone | Evaluated | Saved | Notice
OnEvent = Callable[[Event], None]

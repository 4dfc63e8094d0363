"""Loss of every step of a transformers ``Trainer``, whose callbacks are told only means over ``logging_steps`` steps.

A step's loss is the sum of what ``Trainer.training_step`` returns for its micro-batches, as in the Trainer's own logs.
:class:`TrainerLosses` replaces that method on the Trainer's object during training; losses stay on their device.
"""

import inspect
from typing import Any, TypeVar

from torch import Tensor
from transformers import Trainer

__all__ = ["TrainerLosses", "calling_object"]

Caller = TypeVar("Caller")


def calling_object(kind: type[Caller]) -> Caller | None:
    """The object of this class whose method called the current function, over any number of calls; None without one.

    A Trainer's callbacks are not given the Trainer or the handler that holds them all.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, kind):
            return caller
        frame = frame.f_back
    return None


class TrainerLosses:
    """Losses of the steps of a Trainer.

    Example:
        >>> TrainerLosses().take() is None
        True
    """

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._replaced: dict[str, Any] = {}
        self._sum: Tensor | None = None

    def attach(self, trainer: Trainer | None) -> None:
        """Start to add up the losses of a Trainer."""
        self.detach()
        if trainer is None:
            return
        training_step = trainer.training_step

        def adding_training_step(*args: Any, **kwargs: Any) -> Tensor:
            loss = training_step(*args, **kwargs)
            self._sum = loss.detach() if self._sum is None else self._sum + loss.detach()
            return loss

        self._trainer = trainer
        self._replaced = {name: value for name, value in vars(trainer).items() if name == "training_step"}
        vars(trainer)["training_step"] = adding_training_step

    def detach(self) -> None:
        """Give the Trainer its own method back."""
        if self._trainer is not None:
            del vars(self._trainer)["training_step"]
            vars(self._trainer).update(self._replaced)
        self._trainer, self._sum = None, None

    def take(self) -> Tensor | None:
        """The loss since the last call, [] on its device; None if no micro-batch was seen."""
        loss, self._sum = self._sum, None
        return loss

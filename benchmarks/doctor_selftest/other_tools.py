"""Other tools that find out why a training run broke, asked about the same step.

- ``torch.autograd.detect_anomaly`` raises where an operation's backward gives NaN, and shows where its forward stands
  in the source.
- ``transformers.debug_utils.DebugUnderflowOverflow`` raises where a module's weights, inputs or outputs hold NaN or
  Inf.

Both look at single steps and at NaN or Inf alone, so they are asked about the step that broke, or the last one: in all
steps before, loss and gradients were finite.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch

from octavo.errors import NonFiniteLossError
from octavo.training.loop import Trainer

__all__ = ["ANOMALY", "HUGGING_FACE", "ToolAnswer", "asking_others"]

ANOMALY, HUGGING_FACE = "detect_anomaly", "DebugUnderflowOverflow"


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """A tool's words; "" where it found nothing."""

    words: str

    def names(self, path: str) -> bool:
        """Whether the words name a module, or one inside it."""
        return bool(path) and path in self.words


@contextmanager
def asking_others(trainer: Trainer, answers: dict[str, ToolAnswer]) -> Iterator[None]:
    """Put into ``answers`` what other tools say of the last step inside the block, by their names.

    A tool that is not installed has no entry.
    """
    broken: NonFiniteLossError | None = None
    try:
        yield
    except NonFiniteLossError as error:
        broken = error
    if broken is None:
        trainer.step -= 1  # the batches of the step that is done
    try:
        trainer.model.train()
        answers[ANOMALY] = _anomaly(trainer)
        if (answer := _hugging_face(trainer)) is not None:
            answers[HUGGING_FACE] = answer
    finally:
        trainer.optimizer.zero_grad(set_to_none=True)
        if broken is None:
            trainer.step += 1
    if broken is not None:
        raise broken


def _anomaly(trainer: Trainer) -> ToolAnswer:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        try:
            with torch.autograd.detect_anomaly():
                trainer._gradients()  # noqa: SLF001 (one step without its update)
        except RuntimeError as error:
            return ToolAnswer("\n".join([str(error), *(str(one.message) for one in shown[1:])]))
    return ToolAnswer("")


def _hugging_face(trainer: Trainer) -> ToolAnswer | None:
    try:
        from transformers.debug_utils import DebugUnderflowOverflow
    except ImportError:
        return None
    before = {module: set(module._forward_hooks) for module in trainer.model.modules()}  # noqa: SLF001
    attach: Any = DebugUnderflowOverflow
    attach(trainer.model)
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), torch.no_grad():
            _forward(trainer)
    except ValueError:
        return ToolAnswer(_last_frame(printed.getvalue()))
    finally:
        _remove_hooks(before)
    return ToolAnswer("")


def _forward(trainer: Trainer) -> None:
    for inputs, _ in trainer._batches():  # noqa: SLF001
        with trainer.surroundings:
            trainer.model(inputs)


def _last_frame(printed: str) -> str:
    """The frame in which it was seen: the module's name and class, and its tensors' extremes."""
    frames = printed.strip().split("\n                  ")
    return frames[-1].strip()


def _remove_hooks(before: dict[torch.nn.Module, set[int]]) -> None:
    """The tool keeps no handles of its hooks."""
    for module, known in before.items():
        for key in set(module._forward_hooks) - known:  # noqa: SLF001
            del module._forward_hooks[key]  # noqa: SLF001

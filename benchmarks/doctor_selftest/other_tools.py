"""Reports of other tools on the step in which a training run broke.

- ``torch.autograd.detect_anomaly`` raises where an operation's backward gives NaN, and shows the source line of its
  forward.
- ``transformers.debug_utils.DebugUnderflowOverflow`` raises where a module's weights, inputs or outputs hold NaN or
  Inf.

Both examine single steps for NaN or Inf, so they run on the broken step, or else the last one: in all earlier steps,
loss and gradients were finite.
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
    """Report of a tool; "" if it found nothing."""

    words: str

    def names(self, path: str) -> bool:
        """Return True if the report names the module, or a module inside it."""
        return bool(path) and path in self.words


@contextmanager
def asking_others(trainer: Trainer, answers: dict[str, ToolAnswer]) -> Iterator[None]:
    """Run other tools on the last step of the block, and store their reports in ``answers`` by tool.

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
    """Last frame of the output: the module's name and class, and the extremes of its tensors."""
    frames = printed.strip().split("\n                  ")
    return frames[-1].strip()


def _remove_hooks(before: dict[torch.nn.Module, set[int]]) -> None:
    """Remove the hooks added since ``before``; the tool keeps no handles."""
    for module, known in before.items():
        for key in set(module._forward_hooks) - known:  # noqa: SLF001
            del module._forward_hooks[key]  # noqa: SLF001

"""Faults that show in the loss: a learning rate that jumps, inputs that do not belong to their targets."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch import Tensor, nn

from benchmarks.doctor_selftest.faults.fault import Fault
from octavo.training.loop import Trainer

__all__ = ["LOSS_FAULTS"]

STRIKES_AFTER = 12  # steps
JUMP = 20.0  # of the learning rate
SPIKE_STEPS = 4


@contextmanager
def _jumping_rate(trainer: Trainer, _layer: int) -> Iterator[None]:
    """The learning rate is multiplied from one step on, as by a schedule that counts in other units."""
    strikes, genuine = trainer.step + STRIKES_AFTER, trainer._learning_rate  # noqa: SLF001

    def rate() -> float:
        lr: float = genuine() * (JUMP if trainer.step >= strikes else 1.0)
        for group in trainer.optimizer.param_groups:
            group["lr"] = lr
        return lr

    with mock.patch.object(trainer, "_learning_rate", rate):
        yield


@contextmanager
def _mismatched_inputs(trainer: Trainer, _layer: int) -> Iterator[None]:
    """For some steps the inputs of a batch are another sequence's than its targets, as after a wrong shuffle."""
    strikes = trainer.step + STRIKES_AFTER

    def roll(module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor | None:
        is_struck = module.training and strikes <= trainer.step < strikes + SPIKE_STEPS
        return inputs[0].roll(1, dims=0) if is_struck else None

    handle = trainer.model.model.embed_tokens.register_forward_pre_hook(roll)
    try:
        yield
    finally:
        handle.remove()


LOSS_FAULTS = (
    Fault(
        name="learning rate jumps",
        story="the learning rate is twenty times as large from one step on",
        code="learning-rate",
        places=("",),
        inject=_jumping_rate,
        is_remediable=False,
    ),
    Fault(
        name="mismatched inputs",
        story="for four steps the inputs of a batch are another sequence's than its targets",
        code="loss-spike",
        places=("",),
        inject=_mismatched_inputs,
        is_remediable=False,
    ),
)

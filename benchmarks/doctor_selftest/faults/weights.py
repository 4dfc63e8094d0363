"""Weights that something else than the optimizer changes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.doctor_selftest.faults.fault import Fault
from benchmarks.doctor_selftest.faults.workloads import linear_at
from octavo.scaling import ROLES, WEIGHT
from octavo.training.loop import Trainer

__all__ = ["WEIGHT_FAULTS"]

VALUE = "self_attn.v_proj"
STRIKES_AFTER, FACTOR = 12, 100.0  # steps; of the weight


@contextmanager
def _damaged(trainer: Trainer, layer: int) -> Iterator[None]:
    """A weight is multiplied by 100 between two steps, as by a checkpoint that is loaded with a scale applied twice."""
    strikes, weight = trainer.step + STRIKES_AFTER, linear_at(trainer, layer, VALUE).weight

    @torch.no_grad()
    def damage(*_: object) -> None:
        if trainer.step == strikes:
            weight.mul_(FACTOR)

    handle = trainer.optimizer.register_step_post_hook(damage)
    try:
        yield
    finally:
        handle.remove()


WEIGHT_FAULTS = (
    Fault(
        name="damaged weight",
        story="a weight is multiplied by 100 between two steps",
        code="weight-jump",
        places=("model.layers.{layer}." + VALUE,),
        role=ROLES[WEIGHT],
        also=frozenset({"divergence", "loss-spike"}),
        inject=_damaged,
        is_remediable=False,
    ),
)

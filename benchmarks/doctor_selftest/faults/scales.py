"""Faults in scales: frozen, too old, averaged, alternating, halved, rounded."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from benchmarks.doctor_selftest.faults.fault import Fault, Injection
from benchmarks.doctor_selftest.faults.workloads import alternating, growing, jumping, layer_at, padded
from benchmarks.doctor_selftest.faults.wrong_casts import scaling_by
from octavo.scaling import INPUT, ROLES, WEIGHT, scale_updates
from octavo.training.loop import Trainer

__all__ = ["SCALE_FAULTS"]

FROZEN_AFTER = 5  # steps
GATE, DOWN, UP = "mlp.gate_proj", "mlp.down_proj", "mlp.up_proj"


@contextmanager
def _frozen(trainer: Trainer, layer: int) -> Iterator[None]:
    """The input's amax of one layer is no longer updated after some steps."""
    history, began = layer_at(trainer, layer, DOWN).amax_history, trainer.step
    if history is None:
        yield
        return
    genuine = scale_updates.close_steps

    def close(*arguments: Any, **keywords: Any) -> None:
        held = history.amax[INPUT].clone()
        genuine(*arguments, **keywords)
        if trainer.step >= began + FROZEN_AFTER:
            history.amax[INPUT].copy_(held)

    with mock.patch.object(scale_updates, "close_steps", close):
        yield


def _scaled_by(name: str, role: int, change: Callable[[Tensor], Tensor]) -> Injection:
    def inject(trainer: Trainer, layer: int) -> AbstractContextManager[None]:
        return scaling_by(layer_at(trainer, layer, name), role, change)

    return inject


def _place(name: str) -> tuple[str, ...]:
    return ("model.layers.{layer}." + name,)


SCALE_FAULTS = (
    Fault(
        name="frozen scale",
        story="an input's scale is no longer updated while the input grows",
        code="frozen-scale",
        places=_place(DOWN),
        role=ROLES[INPUT],
        also=frozenset({"saturation", "stale-scale"}),
        training={"recipe": "delayed"},
        workload=growing(DOWN, binades_a_step=0.3),
        inject=_frozen,
    ),
    Fault(
        name="history too long",
        story="one large batch stays in a history of 1024 steps and sets the scale for all of them",
        code="stale-scale",
        places=_place(GATE),
        role=ROLES[INPUT],
        also=frozenset({"bulk-underflow", "zero-tensor"}),
        training={"recipe": "delayed", "recipe_options": {"history_length": 1024}},
        workload=jumping(GATE, binades=20, after=3),
    ),
    Fault(
        name="mean of scales",
        story="the mean of a window's scales lags behind an amax that grows",
        code="stale-scale",
        places=_place(GATE),
        role=ROLES[INPUT],
        also=frozenset({"saturation"}),
        training={"recipe": "delayed", "recipe_options": {"statistic": "mean", "history_length": 32}},
        workload=growing(GATE, binades_a_step=0.25),
    ),
    Fault(
        name="scale oscillation",
        story="the scale follows the latest amax, and large and small batches alternate",
        code="scale-oscillation",
        places=_place(DOWN),
        also=frozenset({"saturation", "stale-scale"}),
        training={"recipe": "delayed", "recipe_options": {"statistic": "latest", "history_length": 1}},
        workload=alternating(DOWN, binades=10),
    ),
    Fault(
        name="wrong scale",
        story="a scale is made for a 64th of its tensor's amax",
        code="inexact-amax",
        places=_place(UP),
        role=ROLES[INPUT],
        also=frozenset({"saturation"}),
        inject=_scaled_by(UP, INPUT, lambda amax: amax / 64),
    ),
    Fault(
        name="bf16 amax",
        story="a weight's scale is made from its amax rounded to bf16",
        code="inexact-amax",
        places=_place(DOWN),
        role=ROLES[WEIGHT],
        inject=_scaled_by(DOWN, WEIGHT, lambda amax: amax.bfloat16().float()),
    ),
    Fault(
        name="block scales rounded down",
        story="MXFP8's scales are rounded down to powers of two, so that every seventh block saturates",
        code="saturation",
        places=("",),
        training={"recipe": "mxfp8", "recipe_options": {"scale_rounding": "floor"}},
    ),
    Fault(
        name="padding tokens",
        story="padding tokens with large activations set the scale that all tokens share",
        code="bulk-underflow",
        places=_place(UP),
        role=ROLES[INPUT],
        inject=padded(UP, tokens=4, binades=20),
    ),
)

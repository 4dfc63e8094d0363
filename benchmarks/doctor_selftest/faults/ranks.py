"""Ranks that cast the same tensor differently; these faults run in two processes (doctor_selftest/two_ranks.py)."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import distributed, nn

from benchmarks.doctor_selftest.faults.fault import Fault
from benchmarks.doctor_selftest.faults.workloads import larger, layer_at
from octavo.nn import Linear
from octavo.scaling import ROLES, WEIGHT, scale_updates
from octavo.scaling.scale_updates import close_steps
from octavo.training import loop
from octavo.training.loop import Trainer

__all__ = ["RANK_FAULTS"]

GATE, KEY = "mlp.gate_proj", "self_attn.k_proj"


@contextmanager
def _first_rank_larger(trainer: Trainer, layer: int) -> Iterator[None]:
    """The first rank's batches have larger activations than the others'."""
    with larger(GATE, binades=6)(trainer, layer) if distributed.get_rank() == 0 else nullcontext():
        yield


@contextmanager
def _of_the_next_rank(_trainer: Trainer, _layer: int) -> Iterator[None]:
    """Every rank closes its step with the amaxes of the next one's data."""

    def close(model: nn.Module, **_: Any) -> None:
        layers = [module for module in model.modules() if isinstance(module, Linear)]
        for history in (layer.amax_history for layer in layers):
            if history is not None:
                everyones = [torch.empty_like(history.pending) for _ in range(distributed.get_world_size())]
                distributed.all_gather(everyones, history.pending)
                history.pending.copy_(everyones[(distributed.get_rank() + 1) % len(everyones)])
        close_steps(layers)

    with mock.patch.object(loop, "update_scales", close):
        yield


@contextmanager
def _halved(trainer: Trainer, layer: int) -> Iterator[None]:
    """Halve the last rank's scale of one weight."""
    history = layer_at(trainer, layer, KEY).amax_history
    if history is None or distributed.get_rank() == 0:
        yield
        return
    genuine = scale_updates.close_steps

    def close(*arguments: Any, **keywords: Any) -> None:
        genuine(*arguments, **keywords)
        history.amax[WEIGHT] = history.window[WEIGHT].amax() / 2

    with mock.patch.object(scale_updates, "close_steps", close):
        yield


RANK_FAULTS = (
    Fault(
        name="amax of the wrong ranks",
        story="amaxes are reduced over a group that the rank itself is not in",
        code="rank-mismatch",
        places=("model.layers.{layer}." + GATE,),
        also=frozenset({"saturation", "stale-scale"}),
        training={"recipe": "delayed"},
        workload=_first_rank_larger,
        inject=_of_the_next_rank,
        ranks=2,
        is_remediable=False,
    ),
    Fault(
        name="halved scale of a rank",
        story="one rank casts a weight with half the scale of the others",
        code="rank-mismatch",
        places=("model.layers.{layer}." + KEY,),
        role=ROLES[WEIGHT],
        also=frozenset({"saturation", "stale-scale"}),
        training={"recipe": "delayed"},
        inject=_halved,
        ranks=2,
        is_remediable=False,
    ),
)

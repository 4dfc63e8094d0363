"""The amaxes of all sharded weights of a step, reduced over the ranks by one collective.

The first gather after an optimizer's step, or after another write to its weight, measures every weight that has
changed and reduces the amaxes of the groups that ranks share (:class:`octavo.parallel.shard_cast.ShardCast`) with one
MAX all-reduce. All ranks see the same steps and the same writes to the sharded parameters, and so reduce at the same
gather. Each process group of a model has its own collective.

A delayed cast scales by amaxes of finished steps, which the end of each step has reduced already
(:mod:`octavo.scaling.scale_updates`); its weight takes part only as long as there are none.

What no version counts, such as writes through ``.data``, is seen where it is expected: a forward pass without
gradients, the one after it, and every forward pass of weights that no ``torch.optim`` optimizer holds measure all
weights. After such a write between passes with gradients, ``octavo.update_scales(model)`` on all ranks lets them be
measured. Whether a module is in ``train()`` or ``eval()`` makes no difference, as it may differ between the ranks.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, distributed

from octavo.numerics import Scaling
from octavo.parallel.shard_cast import ShardCast
from octavo.scaling import inside_backward

__all__ = ["MeasuredWeight", "StepAmaxes"]


class MeasuredWeight(Protocol):
    """A sharded weight whose amaxes are reduced."""

    measured: tuple[object, ...]
    amaxes: dict[ShardCast, Tensor]

    def state(self) -> tuple[object, ...]:
        """Return what changes when the weight, or a cast of it, changes; equal on all ranks."""
        ...

    def casts(self) -> Sequence[ShardCast]:
        """Return the casts that the current recipe may need."""
        ...

    def past_amax(self) -> Tensor | None:
        """Return the amax of finished steps, float32 [], 0 before the first; None of a recipe without a history."""
        ...

    def local_rows(self) -> Tensor:
        """Return this rank's rows."""
        ...

    def group(self) -> Any:
        """Return the process group of the ranks that share the rows."""
        ...


class StepAmaxes:
    """Reduction of the amaxes of the weights of one model.

    Attributes:
        weights: the weights.
        generation: a weight adds 1 where all of them must be measured anew.
        with_gradients: whether the model's last forward pass was called with gradients enabled.
    """

    def __init__(self) -> None:
        self.weights: list[MeasuredWeight] = []
        self.generation = 0
        self.with_gradients = True

    def note_gradients(self, *_: object) -> None:
        """Before the model's forward pass, note whether gradients are enabled."""
        self.with_gradients = torch.is_grad_enabled() or inside_backward()

    @torch.no_grad()
    def of(self, weight: MeasuredWeight) -> dict[ShardCast, Tensor]:
        """Return the ranks' largest amaxes of a weight, by cast."""
        if weight.measured != weight.state():
            group = weight.group()
            changed = [each for each in self.weights if each.group() is group and each.measured != each.state()]
            _reduce(changed, group)
        return weight.amaxes


def _reduce(weights: list[MeasuredWeight], group: Any) -> None:
    """Measure weights, and reduce their amaxes together."""
    parts = [
        (weight, cast, cast.measure(weight.local_rows()))
        for weight, has_past in zip(weights, _have_past(weights), strict=True)
        for cast in weight.casts()
        if not (has_past and cast.spec.scaling == Scaling.DELAYED)
    ]
    for weight in weights:
        weight.measured, weight.amaxes = weight.state(), {}
    if distributed.get_world_size(group) == 1 or not any(amaxes.numel() for _, _, amaxes in parts):
        for weight, cast, amaxes in parts:
            weight.amaxes[cast] = amaxes
        return
    reduced = torch.cat([amaxes.flatten() for _, _, amaxes in parts])
    distributed.all_reduce(reduced, op=distributed.ReduceOp.MAX, group=group)
    for (weight, cast, amaxes), largest in zip(parts, reduced.split([each.numel() for *_, each in parts]), strict=True):
        weight.amaxes[cast] = largest.view_as(amaxes)


def _have_past(weights: list[MeasuredWeight]) -> list[bool]:
    """Return of which weights amaxes of finished steps are known, the same on all ranks."""
    pasts = [weight.past_amax() for weight in weights]
    known = [past for past in pasts if past is not None]
    positive = iter((torch.stack(known) > 0).tolist() if known else [])  # one wait for the device, not one a weight
    return [past is not None and next(positive) for past in pasts]

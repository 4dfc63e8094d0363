"""The amaxes of all weights of a step that ranks share, reduced over the ranks by one collective.

The first use of a weight after an optimizer's step, or after another write to a weight, measures every weight that has
changed and reduces the amaxes of the scaling groups that ranks share with one MAX all-reduce. All ranks see the same
steps and the same writes to parameters, and so reduce at the same use. FSDP2's shards take part
(:mod:`octavo.parallel.weight_gather`), and the slices of tensor parallelism (:mod:`octavo.nn.sliced_weight`). Where
FSDP2 shards slices, there are two collectives, one over each dimension of the mesh.

A delayed cast scales by amaxes of finished steps, which the end of each step has reduced already
(:mod:`octavo.scaling.scale_updates`); its weight takes part only as long as there are none.

What no version counts, such as writes through ``.data``, is seen where it is expected: a forward pass without
gradients, the one after it, and every forward pass of weights that no ``torch.optim`` optimizer has held at a step
measure all weights. After such a write between passes with gradients, ``octavo.update_scales(model)`` on all ranks lets
them be measured. Whether a module is in ``train()`` or ``eval()`` makes no difference, as it may differ between the
ranks.
"""

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, distributed

from octavo.scaling.operand_scaling import inside_backward

__all__ = ["MeasuredWeight", "StepAmaxes"]


class MeasuredWeight(Protocol):
    """A weight whose amaxes are reduced.

    Attributes:
        measured: its state when it was measured.
        amaxes: the ranks' largest, by cast.
        last_generation: the generation of its last forward pass.
    """

    measured: tuple[object, ...]
    amaxes: dict[Any, Tensor]
    last_generation: int

    def state(self) -> tuple[object, ...]:
        """Return what changes when the weight, or a cast of it, changes; equal on all ranks."""
        ...

    def casts(self, *, has_past: bool = False) -> Sequence[Any]:
        """Return the casts that the current recipe may need, without delayed ones where the past is known."""
        ...

    def past_amax(self) -> Tensor | None:
        """Return the amax of finished steps, float32 [], 0 before the first; None of a recipe without a history."""
        ...

    def measure(self, cast: Any) -> Tensor:
        """Return this rank's amaxes of a cast."""
        ...

    def groups(self) -> tuple[Any, ...]:
        """Return the process groups of the ranks that share the weight; none of a weight that cannot be read now."""
        ...

    def groups_of(self, cast: Any) -> tuple[Any, ...]:
        """Return those of them whose ranks share scaling groups of a cast."""
        ...


class StepAmaxes:
    """Reduction of the amaxes of the weights of one model.

    Attributes:
        weights: the weights, by layer.
        generation: a weight adds 1 where all of them must be measured anew.
        with_gradients: whether the model's running forward pass was called with gradients enabled.
        had_gradients: whether that of the last layer to begin was.
    """

    def __init__(self) -> None:
        self.weights: weakref.WeakKeyDictionary[Any, MeasuredWeight] = weakref.WeakKeyDictionary()
        self.generation = 0
        self.with_gradients = self.had_gradients = True

    def note_gradients(self, *_: object) -> None:
        """Before the model's forward pass, note whether gradients are enabled."""
        self.with_gradients = torch.is_grad_enabled() or inside_backward()

    def begin_forward(self, weight: MeasuredWeight, *, is_held: bool) -> None:
        """Let all weights be measured anew where a write to them might not have been seen.

        No version counts what is written through ``.data`` or by ``torch._foreach_*``. Such writes are expected before
        and after a pass without gradients (an evaluation of averaged weights, perhaps by some layers alone), and where
        no ``torch.optim`` optimizer has held the weights at a step. Both are the same on all ranks, which run their
        passes and steps together.

        Args:
            weight: of the layer that is called.
            is_held: whether such an optimizer has.
        """
        ends_evaluation = self.with_gradients and not self.had_gradients
        written = not (self.with_gradients and is_held)
        if ends_evaluation or (written and weight.last_generation == self.generation):
            self.generation += 1
        weight.last_generation, self.had_gradients = self.generation, self.with_gradients

    @torch.no_grad()
    def of(self, weight: MeasuredWeight) -> dict[Any, Tensor]:
        """Return the ranks' largest amaxes of a weight, by cast."""
        if weight.measured != weight.state():
            groups, weights = weight.groups(), list(self.weights.values())
            with torch.inference_mode(False):  # training may use the amaxes that an evaluation has measured
                _measure([each for each in weights if each.groups() == groups and each.measured != each.state()])
        return weight.amaxes


def _measure(weights: list[MeasuredWeight]) -> None:
    """Measure weights of the same process groups, and reduce their amaxes together."""
    parts = [
        (weight, cast)
        for weight, has_past in zip(weights, _have_past(weights), strict=True)
        for cast in weight.casts(has_past=has_past)
    ]
    for weight in weights:
        weight.amaxes = {}
    for weight, cast in parts:
        weight.amaxes[cast] = weight.measure(cast)
    for group in weights[0].groups():
        _reduce([(weight, cast) for weight, cast in parts if group in weight.groups_of(cast)], group)
    for weight in weights:  # last: an error before leaves them to be measured again
        weight.measured = weight.state()


def _reduce(parts: list[tuple[MeasuredWeight, Any]], group: Any) -> None:
    """Reduce the amaxes of casts over one group."""
    amaxes = [weight.amaxes[cast] for weight, cast in parts]
    if distributed.get_world_size(group) == 1 or not any(each.numel() for each in amaxes):
        return
    reduced = torch.cat([each.flatten() for each in amaxes])
    distributed.all_reduce(reduced, op=distributed.ReduceOp.MAX, group=group)
    for (weight, cast), largest in zip(parts, reduced.split([each.numel() for each in amaxes]), strict=True):
        weight.amaxes[cast] = largest.view_as(weight.amaxes[cast])


def _have_past(weights: list[MeasuredWeight]) -> list[bool]:
    """Return of which weights amaxes of finished steps are known, the same on all ranks."""
    pasts = [weight.past_amax() for weight in weights]
    known = [past for past in pasts if past is not None]
    positive = iter((torch.stack(known) > 0).tolist() if known else [])  # one wait for the device, not one a weight
    return [past is not None and next(positive) for past in pasts]

"""A layer's weight that ranks divide by tensor parallelism, whose amaxes are reduced with those of its model's layers.

The scales of inputs and gradients are known only when these are, just before their cast, and so take an all-reduce a
layer. Weights change once a step: their amaxes are reduced together (:mod:`octavo.scaling.step_amaxes`), by the first
layer that runs in the step.

FSDP2 gathers slices before the layer runs and frees them after it. The weights that are gathered when a layer runs are
then reduced together, in each forward pass. Of frozen slices it raises no version: after loading them between passes
with gradients, call ``octavo.update_scales(model)`` on all ranks.

torch's reentrant checkpoint runs forward without gradients, which looks like an evaluation: all weights are measured
anew in each micro-batch. ``use_reentrant=False`` leaves it at once a step.
"""

import weakref
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from octavo.autocast import active_recipe
from octavo.numerics import Granularity, PerTensor, Scaling, measure
from octavo.recipes import Recipe
from octavo.scaling import WEIGHT, Slices, inside_backward
from octavo.scaling.rank_reduction import DelayedLayer
from octavo.scaling.step_amaxes import StepAmaxes

__all__ = ["SlicedWeight"]


class _Layer(DelayedLayer, Protocol):
    recipe: Recipe
    kept_own_amaxes: bool

    def keeps_own_amaxes(self, group: Any) -> bool:
        """Whether each rank of the group goes on with amaxes of its own."""
        ...

    def weight_slice(self) -> tuple[Tensor, Slices] | None:
        """This rank's slice of the weight; None of a whole weight."""
        ...


class _Cast(NamedTuple):
    """Scaling groups that ranks share, of the weight or of its transpose."""

    granularity: Granularity
    transposed: bool


class SlicedWeight:
    """The weight of one layer, a :class:`octavo.scaling.step_amaxes.MeasuredWeight`.

    Args:
        layer: it keeps no reference to this object.
        step: of the layer's model.
    """

    def __init__(self, layer: _Layer, step: StepAmaxes) -> None:
        self._layer, self._step = weakref.ref(layer), step
        self._parameter, self._replacements = layer.stored_weight, 0
        self.measured: tuple[object, ...] = ()
        self.amaxes: dict[_Cast, Tensor] = {}
        self.last_generation = -1

    def begin_forward(self) -> None:
        """Notice the begin of a forward pass of the layer, which may not have seen a write to its weight."""
        if inside_backward():  # activation checkpointing repeats one
            return
        layer = self._called()
        updates, weight = layer.scale_updates, layer.stored_weight
        self._step.note_gradients()
        self._step.begin_forward(self, is_held=updates.is_held(weight) if weight.requires_grad else updates.was_held)

    def amax(self, granularity: Granularity, transposed: bool) -> Tensor:
        """Return the whole weight's amaxes of scaling groups that ranks share."""
        return self._step.of(self)[_cast(granularity, transposed)]

    # As a MeasuredWeight

    def state(self) -> tuple[object, ...]:
        """Return the optimizer's step, the parameter with its version, that of past amaxes, and the casts."""
        layer = self._called()
        weight, history = layer.stored_weight, layer.amax_history
        if self._parameter is not weight:
            self._parameter, self._replacements = weight, self._replacements + 1
        steps = layer.scale_updates.optimizer_steps if weight.requires_grad else 0
        past = None if history is None or layer.kept_own_amaxes else _version(history.amax)
        identity = self._replacements, _version(weight), weight.dtype, weight.device
        return self._step.generation, steps, *identity, past, *self.casts()

    def casts(self, *, has_past: bool = False) -> tuple[_Cast, ...]:
        """Return the scaling groups of both passes' casts that ranks share."""
        layer, recipe = self._called(), self._recipe()
        part = layer.weight_slice()
        if part is None:
            return ()
        has_past = has_past or layer.keeps_own_amaxes(part[1].group)
        casts = (
            _cast(spec.granularity, transposed)
            for transposed, spec in enumerate((recipe.output.b, recipe.grad_input.b))
            if spec is not None and not (has_past and spec.scaling == Scaling.DELAYED)
        )
        shared = (each for each in casts if part[1].divides_groups(each.granularity, transposed=each.transposed))
        return tuple(dict.fromkeys(shared))

    def past_amax(self) -> Tensor | None:
        """Return the amax of finished steps, float32 [], of a delayed recipe that has a history which ranks share."""
        layer = self._called()
        history = None if layer.kept_own_amaxes else layer.amax_history
        return None if history is None or not self._recipe().is_delayed else history.amax[WEIGHT]

    def measure(self, cast: _Cast) -> Tensor:
        """Return the amaxes of this rank's slice."""
        part = self._called().weight_slice()
        assert part is not None
        weight = part[0].detach()
        return measure(weight.t() if cast.transposed else weight, cast.granularity).amax

    def groups(self) -> tuple[Any, ...]:
        """Return the process group of the ranks that have the slices; none where the layer has no slice now."""
        layer = self._layer()
        part = None if layer is None else layer.weight_slice()
        return () if part is None else (part[1].group,)

    def groups_of(self, _: _Cast) -> tuple[Any, ...]:
        """Return the same."""
        return self.groups()

    def _called(self) -> _Layer:
        layer = self._layer()
        assert layer is not None
        return layer

    def _recipe(self) -> Recipe:
        layer = self._called()
        last = layer.last_recipe if inside_backward() else None
        return active_recipe(layer.recipe) if last is None else last


def _version(tensor: Tensor) -> object:
    """The number of writes to a tensor; a new object for one made in inference mode, whose writes are not counted."""
    return object() if tensor.is_inference() else tensor._version  # noqa: SLF001


def _cast(granularity: Granularity, transposed: bool | int) -> _Cast:
    """A tensor and its transpose have one amax."""
    return _Cast(granularity, bool(transposed) and not isinstance(granularity, PerTensor))

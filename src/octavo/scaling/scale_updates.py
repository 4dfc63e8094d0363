"""When the steps of delayed layers end: with an optimizer's step, on all ranks together.

A step of delayed scaling is an optimizer's step, however many micro-batches it has. Three signs end it, in this order:

1. ``torch.optim`` calls a hook after every step of every optimizer. It closes the models whose parameters the optimizer
   holds, and those that ran and have no optimizer of their own (all layers frozen, FSDP's flat parameters). A step that
   a gradient scaler leaves out ends nothing.
2. As long as no optimizer is known for a model, a weight that was written to since the last training forward ends the
   step: a hand-written update.
3. ``octavo.update_scales(model)``.

All layers of all models that end together are closed together: where a process group is initialized, one MAX
all-reduce of their amaxes comes first, so that every rank goes on with the same scales, whatever wraps the model.
A tensor that no rank used records nothing.

Transformer Engine reduces over the default group too (its documentation, "Using FP8", ``amax_reduction_group``).
"""

import sys
import warnings
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, distributed
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from octavo.errors import ConfigError
from octavo.recipes import Close, Recipe
from octavo.scaling.amax_history import EMPTY, AmaxHistory, ScaleUpdates, WeightSeen
from octavo.scaling.operand_scaling import ROLES, inside_backward

__all__ = [
    "OptimizerSteps",
    "close_block_over_ranks",
    "close_if_written",
    "close_over_ranks",
    "close_steps",
    "default_group",
    "follow_optimizers",
    "is_written",
    "reduce_amaxes",
    "reduces",
    "stop_following",
]

_STEPS_UNTIL_CALLED = 100  # optimizer steps in which every layer, also a seldom chosen expert, should have run
_SAMPLES = 16  # rows and columns of a weight that are compared to see whether it was written to


class DelayedLayer(Protocol):
    """A layer that may keep an amax history."""

    path: str
    in_features: int
    out_features: int
    scale_updates: ScaleUpdates
    amax_history: AmaxHistory | None
    last_recipe: Recipe | None

    @property
    def stored_weight(self) -> Tensor:
        """The parameter that holds the weight."""
        ...

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """As of ``torch.nn.Module``."""
        ...


_layers: "weakref.WeakKeyDictionary[DelayedLayer, None]" = weakref.WeakKeyDictionary()  # in the order of registration
_agreed: "weakref.WeakKeyDictionary[Any, set[int]]" = weakref.WeakKeyDictionary()  # what groups' ranks have compared


class OptimizerSteps:
    """How many steps the process's optimizers have taken since the first layer that wants to know."""

    count = 0
    watching = False

    @classmethod
    def watch(cls) -> None:
        """Count from now on."""
        if not cls.watching:
            register_optimizer_step_post_hook(_after_step)
            cls.watching = True


def follow_optimizers(layer: DelayedLayer) -> None:
    """Let optimizers' steps close the layer's, as long as it lives."""
    OptimizerSteps.watch()
    _layers[layer] = None


def stop_following(layer: DelayedLayer) -> None:
    """Forget a layer."""
    _layers.pop(layer, None)


def _living() -> list[DelayedLayer]:
    """A list: other threads may register layers at any time."""
    return [layer for reference in _layers.keyrefs() if (layer := reference()) is not None]


def default_group() -> "distributed.ProcessGroup | None":
    """The default process group if it has more than one rank."""
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return distributed.group.WORLD
    return None


def reduces(updates: ScaleUpdates) -> bool:
    """Whether a model's steps end on several ranks together."""
    return _group_of(updates) is not None


def _group_of(updates: ScaleUpdates) -> "distributed.ProcessGroup | None":
    """The group that ``convert`` was given, or the default group."""
    return default_group() if updates.group is None else None if updates.group == "rank" else updates.group


@torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001 (a compiled optimizer step calls it too; torch.compiler.disable imports dynamo)
def _after_step(optimizer: Optimizer, *_: object) -> None:
    """Close the steps that end with this optimizer's."""
    OptimizerSteps.count += 1
    layers = list(_stepped(optimizer))
    _remind_of_checkpoints(optimizer, layers)
    _warn_of_layers_not_run(layers)
    layers = [layer for layer in layers if not layer.scale_updates.manual]
    if not layers:
        return
    if not inside_backward():
        close_over_ranks(layers, over=_was_taken(optimizer))
        return
    # An optimizer that steps within the backward pass: gradients of other layers are still to come.
    task = torch._C._current_graph_task_id()  # noqa: SLF001
    layers = [layer for layer in layers if layer.scale_updates.closing_after != task]
    for layer in layers:
        layer.scale_updates.closing_after = task
    if layers:
        torch.autograd.Variable._execution_engine.queue_callback(lambda: close_over_ranks(layers))  # noqa: SLF001


def _was_taken(optimizer: Optimizer) -> Tensor | None:
    """Whether a fused optimizer took the step that a gradient scaler gave it; None if no scaler did."""
    found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
    return None if found_inf is None else (found_inf == 0).all()


def _stepped(optimizer: Optimizer) -> Iterator[DelayedLayer]:
    """The layers of models that the optimizer updates, and of those that ran and have no optimizer of their own."""
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for updates, layers in _by_model(_living()):
        if any(id(parameter) in updated for layer in layers for parameter in layer.parameters()):
            updates.has_optimizer = True
            yield from layers
        elif updates.ran and not updates.has_optimizer:
            yield from layers


def _by_model(layers: Iterable[DelayedLayer]) -> Iterator[tuple[ScaleUpdates, list[DelayedLayer]]]:
    models: dict[int, tuple[ScaleUpdates, list[DelayedLayer]]] = {}
    for layer in layers:
        models.setdefault(id(layer.scale_updates), (layer.scale_updates, []))[1].append(layer)
    return iter(models.values())


def is_written(layer: DelayedLayer) -> bool:
    """Whether a model without an optimizer had this layer's weight updated since the last training forward."""
    updates, history = layer.scale_updates, layer.amax_history
    seen = None if history is None else updates.weights_seen.get(history)
    weight = layer.stored_weight
    if updates.has_optimizer or updates.manual or seen is None or not _is_readable(weight):
        return False
    return weight._version != seen.version or not torch.equal(_sample(weight), seen.sample)  # noqa: SLF001


@torch.no_grad()
def close_if_written(layer: DelayedLayer, region: Tensor) -> None:
    """Before a training forward: close the model's step if its weights were updated without an optimizer.

    Inside of an autocast block, that of ``region``, the block decides where steps end with blocks.
    """
    updates, history = layer.scale_updates, layer.amax_history
    if updates.has_optimizer or updates.manual or history is None:
        return
    weight, by_block = layer.stored_weight, history.spec.close == Close.AUTOCAST and int(region) > 0
    if by_block or not weight.requires_grad or not _is_readable(weight):
        return
    if is_written(layer):
        close_over_ranks([other for other in _living() if other.scale_updates is updates])
    updates.weights_seen[history] = WeightSeen(weight._version, _sample(weight))  # noqa: SLF001


def _is_readable(weight: Tensor) -> bool:
    """Whether elements can be compared now: of a plain tensor, and not while a CUDA graph is captured."""
    plain = type(weight) is torch.nn.Parameter and weight.ndim == 2 and not weight.is_meta  # FSDP1 leaves flat slices
    return plain and not (weight.is_cuda and torch.cuda.is_current_stream_capturing())


def _sample(weight: Tensor) -> Tensor:
    """Some of a weight's elements, by value."""
    rows, columns = (max(1, size // _SAMPLES) for size in weight.shape)
    return weight.detach()[::rows, ::columns].clone()


def close_block_over_ranks(layer: DelayedLayer, region: Tensor) -> None:
    """Before a training forward in another autocast block: close all layers' steps of the block before, on all ranks.

    Without ranks each layer does so for itself (:meth:`AmaxHistory.begin_forward`), also in a graph.
    """
    updates, history = layer.scale_updates, layer.amax_history
    if history is None or history.spec.close != Close.AUTOCAST or not reduces(updates):
        return
    block = int(region)
    if updates.block not in (0, block):
        ended = [other for other in _living() if other.scale_updates.block not in (0, block)]
        for each in ended:
            each.scale_updates.block = 0
        close_over_ranks([each for each in ended if not each.scale_updates.manual])
    updates.block = block


@torch.no_grad()
def close_over_ranks(
    layers: Sequence[DelayedLayer],
    *,
    group: "distributed.ProcessGroup | None" = None,
    over: Tensor | None = None,
) -> None:
    """Close the steps of models together, on all ranks of ``group``; None: of each model's own."""
    _reduce_over_groups(layers, group)
    close_steps(layers, over=over)


def _reduce_over_groups(layers: Sequence[DelayedLayer], every: "distributed.ProcessGroup | None") -> None:
    """Reduce the running step's amaxes, of the layers of each group together; of none they stay each rank's own."""
    groups: dict[int, tuple[Any, list[DelayedLayer]]] = {}
    for layer in layers:
        group = _group_of(layer.scale_updates) if every is None else every
        groups.setdefault(id(group), (group, []))[1].append(layer)
    for group, members in groups.values():
        if group is not None:
            reduce_amaxes(members, group)


@torch.no_grad()
def close_steps(layers: Sequence[DelayedLayer], *, over: Tensor | None = None) -> None:
    """Close the layers' steps as they were recorded; ``over`` False leaves them open."""
    for updates, _ in _by_model(layers):
        updates.ran = False
        updates.weights_seen.clear()
    for layer in layers:
        if layer.amax_history is not None:
            layer.amax_history.close(where=None if over is None else over.to(layer.amax_history.pending.device))


@torch.no_grad()
def reduce_amaxes(layers: Sequence[DelayedLayer], group: "distributed.ProcessGroup") -> None:
    """Raise the running step's amaxes and overflow marks to the largest of all ranks: nothing recorded is below 0.

    Raises:
        ConfigError: the ranks hold other layers.
    """
    histories = [layer.amax_history for layer in layers]
    devices = [history.pending.device for history in histories if history is not None]
    if not devices:
        return
    _check_same_layers(layers, group, devices[0])
    rows = torch.stack([_recorded(history, devices[0]) for history in histories])
    distributed.all_reduce(rows, op=distributed.ReduceOp.MAX, group=group)
    for history, row in zip(histories, rows, strict=True):
        if history is not None:
            pending, overflowed = row.tensor_split(2)
            history.pending.copy_(pending)
            history.overflowed.copy_(overflowed > 0)


def _recorded(history: AmaxHistory | None, device: torch.device) -> Tensor:
    """float32 [6]: a layer's pending amaxes and overflow marks; a layer without a history has none."""
    if history is None:
        return torch.tensor([EMPTY] * len(ROLES) + [0.0] * len(ROLES), device=device)
    return torch.cat([history.pending, history.overflowed.float()]).to(device)


def _check_same_layers(layers: Sequence[DelayedLayer], group: Any, device: torch.device) -> None:
    """Compare the layers with the other ranks', once: a collective of tensors of other lengths would hang or mix them.

    Every rank sees a difference, since a maximum of numbers and of their negatives shows whether they are alike.
    """
    names = "\n".join(f"{layer.path} {layer.in_features} {layer.out_features}" for layer in layers)
    digest = zlib.crc32(names.encode())
    if digest in _agreed.setdefault(group, set()):
        return
    mine = torch.tensor([len(layers), digest], device=device)
    largest = torch.cat([mine, -mine])
    distributed.all_reduce(largest, op=distributed.ReduceOp.MAX, group=group)
    if not torch.equal(largest[:2], -largest[2:]):
        raise ConfigError(
            f"the ranks' layers differ (this rank closes a step of {len(layers)}, others of {-int(largest[2])} to "
            f"{int(largest[0])}, or of other names), so that their amaxes cannot be reduced together; give convert the "
            'process group of the ranks that hold the same layers, amax_group=group, or amax_group="rank" for each '
            "rank alone"
        )
    _agreed[group].add(digest)


def _remind_of_checkpoints(optimizer: Optimizer, layers: Sequence[DelayedLayer]) -> None:
    """Say once that an optimizer's state was saved, for a training to resume, and scaling state was not.

    The two may be saved in either order, so it is looked at before the next step.
    """
    for updates, members in _by_model(layers):
        delayed = any(layer.amax_history is not None for layer in members)
        if updates.optimizer_saved and not updates.state_read and delayed and not updates.reminded_of_state:
            updates.reminded_of_state = True
            if distributed.is_available() and distributed.is_initialized() and distributed.get_rank():
                continue  # one rank may have saved for all
            warnings.warn(
                "the optimizer's state was saved without the scaling state of its model, whose layers scale from "
                "amaxes of past steps: training that resumes from it will not be the same; save "
                "octavo.scaling_state(model) too, or see octavo.integrations for Trainer, Lightning and accelerate",
                stacklevel=3,
            )
        updates.optimizer_saved = updates.state_read = False
        if not updates.has_optimizer or optimizer in updates.optimizers:
            continue
        updates.optimizers.add(optimizer)
        optimizer.register_state_dict_pre_hook(partial(_mark_saved, weakref.ref(updates)))


def _warn_of_layers_not_run(layers: Sequence[DelayedLayer]) -> None:
    """Name layers, once, that no forward has called while it called others; in compiled graphs no call is seen."""
    for updates, members in _by_model(layers):
        updates.optimizer_steps += 1
        unused = [layer.path for layer in members if layer.last_recipe is None]
        if updates.optimizer_steps != _STEPS_UNTIL_CALLED or len(unused) in (0, len(members)) or _has_compiled():
            continue
        warnings.warn(
            f"{len(unused)} converted layers have not been called in {_STEPS_UNTIL_CALLED} steps and run no recipe "
            f"({', '.join(unused[:5])}{', ...' if len(unused) > 5 else ''}): something reads their weights instead, or "
            "they are unused; leave them out with convert's skip",
            stacklevel=3,
        )


def _has_compiled() -> bool:
    """Whether torch.compile has made a graph in this process."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and dynamo.utils.counters["stats"]["unique_graphs"] > 0


def _mark_saved(reference: "weakref.ref[ScaleUpdates]", _: Optimizer) -> None:
    updates = reference()
    if updates is not None:
        updates.optimizer_saved = True

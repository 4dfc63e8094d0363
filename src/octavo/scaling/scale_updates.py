"""End of the steps of delayed layers: with an optimizer's step, on all ranks together.

A step of delayed scaling is an optimizer's step, however many micro-batches it has. Any of four events ends it:

1. ``torch.optim`` calls a hook after every step of every optimizer. It closes the models whose parameters the optimizer
   holds, and those that ran and have no optimizer of their own: all layers frozen, FSDP's flat parameters, or gradients
   that an optimizer over copies of the parameters takes. A step that a gradient scaler leaves out ends nothing, nor
   does one that is part of another optimizer's step (:mod:`octavo.scaling.nested_steps`).
2. As long as no optimizer is known for a model, a weight that was written to since the last training forward ends the
   step: a hand-written update. Some of the elements are compared, for which a GPU is waited for. An optimizer's step
   that calls the model in its closure writes too, and ends the step by 1.
3. ``octavo.update_scales(model)``.
4. With ``Close.AUTOCAST``, as in Transformer Engine, the next training forward outside of the autocast block that the
   last one ran in (:func:`close_block_over_ranks`; :meth:`AmaxHistory.begin_forward` without ranks).

With ``manual`` updates only the third does.

A model's optimizer is known from its first step on, until 100 backward passes come without one, of which the user is
warned. Whether it still exists does not matter: ranks, which close together, collect garbage each at its own time.

All layers of all models that end together are closed together: where a process group is initialized, one MAX
all-reduce of their amaxes comes first, so that every rank goes on with the same scales, whatever wraps the model
(:mod:`octavo.scaling.rank_reduction`). A tensor that no rank used records nothing.

Transformer Engine reduces over the default group too (its documentation, "Using FP8", ``amax_reduction_group``).
"""

import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from octavo.caller_warnings import warn_caller
from octavo.errors import ConfigError
from octavo.recipes import Close
from octavo.scaling.amax_history import ScaleUpdates, WeightSeen, close_histories
from octavo.scaling.nested_steps import is_nested_step, is_stepping
from octavo.scaling.operand_scaling import inside_backward
from octavo.scaling.rank_reduction import DelayedLayer, default_group, reduce_amaxes

__all__ = [
    "OptimizerSteps",
    "close_block_over_ranks",
    "close_if_written",
    "close_over_ranks",
    "close_steps",
    "follow_optimizers",
    "is_written",
    "layers_of",
    "reduces",
    "share_amaxes",
    "stop_following",
    "watch_compiled_backwards",
]

_STEPS_UNTIL_CALLED = 100  # optimizer steps in which every layer, also a seldom chosen expert, should have run
_SAMPLES = 16  # rows and columns of a weight that are compared to see whether it was written to

_layers: "weakref.WeakKeyDictionary[DelayedLayer, None]" = weakref.WeakKeyDictionary()  # in the order of registration


class OptimizerSteps:
    """Count of the optimizer steps of the process since the first layer that watches them."""

    count = 0
    watching = False

    @classmethod
    def watch(cls) -> None:
        """Count from now on."""
        if not cls.watching:
            register_optimizer_step_post_hook(_after_step)
            cls.watching = True


def follow_optimizers(layer: DelayedLayer) -> None:
    """End the layer's steps with optimizers' steps, as long as it exists."""
    OptimizerSteps.watch()
    _layers[layer] = None


def stop_following(layer: DelayedLayer) -> None:
    """Forget a layer."""
    _layers.pop(layer, None)
    layer.scale_updates.weight_amaxes.weights.pop(layer, None)


def watch_compiled_backwards() -> None:
    """Let histories count backward passes that compiled layers take part in, through one weight of each model.

    A graph takes no hook on a layer's result, and its guards need no layer's own number. Accumulating a parameter's
    gradient stays outside of graphs.
    """
    for updates, layers in _by_model(_living()):
        for layer in layers:
            history, weight = layer.amax_history, layer.stored_weight
            trained = isinstance(weight, torch.nn.Parameter) and weight.requires_grad  # FSDP1 leaves views, some stale
            if history is not None and trained and weight.is_leaf and not updates.backwards_watched:
                updates.backwards_watched = True
                weight.register_post_accumulate_grad_hook(partial(_remind, weakref.ref(layer)))


# As torch.compiler.assume_constant_result, which imports dynamo: it runs while a graph is traced, outside of it.
watch_compiled_backwards._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001


@torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001 (compiled autograd traces hooks)
def _remind(reference: "weakref.ref[DelayedLayer]", weight: Tensor) -> None:
    """Count a backward pass in the history that the layer has now."""
    layer = reference()
    if layer is not None and layer.amax_history is not None:
        layer.amax_history.remind(weight)


def _living() -> list[DelayedLayer]:
    """List the registered layers; a list, since other threads may register layers at any time."""
    return [layer for reference in _layers.keyrefs() if (layer := reference()) is not None]


def layers_of(updates: ScaleUpdates) -> list[DelayedLayer]:
    """Return the living layers of a model."""
    return [layer for layer in _living() if layer.scale_updates is updates]


def reduces(updates: ScaleUpdates) -> bool:
    """Return whether a model's steps end on several ranks together."""
    return _group_of(updates) is not None


def share_amaxes(updates: ScaleUpdates, ranks: Iterable[int]) -> bool:
    """Return whether these ranks of the default group go on with the same amaxes of finished steps."""
    if updates.group is None:
        return True
    members = () if updates.group == "rank" else distributed.get_process_group_ranks(updates.group)
    return set(ranks) <= set(members)


def _group_of(updates: ScaleUpdates) -> "distributed.ProcessGroup | None":
    """The group that ``convert`` was given, or the default group."""
    return default_group() if updates.group is None else None if updates.group == "rank" else updates.group


@torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001 (a compiled optimizer step calls it too; torch.compiler.disable imports dynamo)
def _after_step(optimizer: Optimizer, *_: object) -> None:
    """Close the steps that end with this optimizer's."""
    OptimizerSteps.count += 1
    if is_nested_step(optimizer):
        return
    layers = list(_stepped(optimizer))
    _remind_of_checkpoints(layers)
    _warn_of_layers_not_run(layers)
    layers = [layer for layer in layers if not layer.scale_updates.manual]
    if not layers:
        return
    if not inside_backward():
        close_over_ranks(layers, condition=_step_was_taken(optimizer))
        return
    # An optimizer that steps within the backward pass: gradients of other layers are still to come.
    task = torch._C._current_graph_task_id()  # noqa: SLF001
    layers = [layer for layer in layers if layer.scale_updates.closing_after != task]
    for layer in layers:
        layer.scale_updates.closing_after = task
    if layers:
        torch.autograd.Variable._execution_engine.queue_callback(lambda: close_over_ranks(layers))  # noqa: SLF001


def _step_was_taken(optimizer: Optimizer) -> Tensor | None:
    """Return whether a fused optimizer took the step that a gradient scaler gave it; None if no scaler did."""
    found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
    return None if found_inf is None else (found_inf == 0).all()


def _stepped(optimizer: Optimizer) -> Iterator[DelayedLayer]:
    """The layers of models that the optimizer updates, and of those that ran and have no optimizer of their own."""
    for updates, layers in _by_model(_living()):
        parameters = [parameter for layer in layers for parameter in layer.parameters()]
        held = _held(optimizer, parameters)
        if held:
            _warn_of_state_not_loaded(optimizer, layers)
            _remember_optimizer(optimizer, updates, held)
            yield from layers
        elif updates.ran and not _keep_optimizer(updates, parameters) and _may_be_updated(parameters):
            yield from layers


def _held(optimizer: Optimizer, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Those of the parameters that the optimizer holds."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [parameter for parameter in parameters if id(parameter) in held]


def _remember_optimizer(optimizer: Optimizer, updates: ScaleUpdates, held: Iterable[Tensor]) -> None:
    """Remember what a model's optimizer holds, and mark from now on when its state is saved."""
    if optimizer not in updates.optimizers:
        updates.optimizers.add(optimizer)
        optimizer.register_state_dict_pre_hook(partial(_mark_saved, weakref.ref(updates)))
    updates.hold(held)


def _keep_optimizer(updates: ScaleUpdates, parameters: Iterable[Tensor]) -> bool:
    """Forget a model's optimizer if it held none of these parameters, which are new; return whether it is known."""
    updates.has_optimizer = updates.has_optimizer and any(map(updates.is_held, parameters))
    return updates.has_optimizer


def _may_be_updated(parameters: Iterable[Tensor]) -> bool:
    """Return whether a step of another optimizer may update these parameters.

    A generator's have no gradients while its discriminator is trained.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return not trained or any(parameter.grad is not None for parameter in trained)


def _by_model(layers: Iterable[DelayedLayer]) -> Iterator[tuple[ScaleUpdates, list[DelayedLayer]]]:
    models: dict[int, tuple[ScaleUpdates, list[DelayedLayer]]] = {}
    for layer in layers:
        models.setdefault(id(layer.scale_updates), (layer.scale_updates, []))[1].append(layer)
    return iter(models.values())


def is_written(layer: DelayedLayer) -> bool:
    """Return whether a model without an optimizer had this layer's weight updated since the last training forward."""
    updates, history = layer.scale_updates, layer.amax_history
    seen = None if history is None else updates.weights_seen.get(history)
    weight = layer.stored_weight
    if updates.has_optimizer or updates.manual or seen is None or not _is_readable(weight):
        return False
    return weight._version != seen.version or not torch.equal(_sample(weight), seen.sample)  # noqa: SLF001


@torch.no_grad()
def close_if_written(layer: DelayedLayer, region: Tensor) -> None:
    """Before a training forward: close the model's step if its weights were updated, and by no optimizer.

    The first layer of a pass compares the weights of all: those that run before a written one are in the new step too.
    After a pass without backward the next one's first is not known; there a layer whose weight was written compares.
    Inside of an autocast block, that of ``region``, the block decides where steps end with blocks.
    """
    updates, history = layer.scale_updates, layer.amax_history
    by_block = history is not None and history.spec.close == Close.AUTOCAST and int(region) > 0
    if updates.has_optimizer or updates.manual or history is None or by_block:
        return
    seen = updates.weights_seen.get(history)
    is_old = seen is None or seen.version == layer.stored_weight._version  # noqa: SLF001
    if updates.called and history not in updates.called and is_old:
        updates.called.add(history)
        return
    members = layers_of(updates)
    if any(map(is_written, members)) and not is_stepping(each for other in members for each in other.parameters()):
        close_over_ranks(members)
    for other in members:
        weight = other.stored_weight
        if other.amax_history is not None and weight.requires_grad and _is_readable(weight):
            updates.weights_seen[other.amax_history] = WeightSeen(weight._version, _sample(weight))  # noqa: SLF001
    updates.called = weakref.WeakSet([history])


def _is_readable(weight: Tensor) -> bool:
    """Return whether elements can be compared now: of a plain tensor, and not while a CUDA graph is captured."""
    plain = type(weight) is torch.nn.Parameter and weight.ndim > 1 and not weight.is_meta  # FSDP1 leaves flat slices
    return plain and not (weight.is_cuda and torch.cuda.is_current_stream_capturing())


def _sample(weight: Tensor) -> Tensor:
    """Some of a weight's elements, by value."""
    rows, columns = (max(1, size // _SAMPLES) for size in weight.shape[-2:])
    return weight.detach()[..., ::rows, ::columns].clone()


def close_block_over_ranks(layer: DelayedLayer, region: Tensor) -> None:
    """Before a training forward in another autocast block: close all layers' steps of the block before, on all ranks.

    Without ranks each layer does so for itself (:meth:`AmaxHistory.begin_forward`), also in a graph.

    Raises:
        ConfigError: it is one of DDP's join context.
    """
    updates, history = layer.scale_updates, layer.amax_history
    if history is None or not reduces(updates):
        return
    _refuse_join()
    if history.spec.close != Close.AUTOCAST:
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
    condition: Tensor | None = None,
) -> None:
    """Close the steps of models together, on all ranks of ``group``; None: of each model's own.

    Args:
        layers: all layers of the models.
        group: the ranks.
        condition: as in :meth:`AmaxHistory.close`.
    """
    _reduce_over_groups(layers, group)
    close_steps(layers, condition=condition)


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
def close_steps(layers: Sequence[DelayedLayer], *, condition: Tensor | None = None) -> None:
    """Close the layers' steps without a reduction over ranks; ``condition`` is that of :meth:`AmaxHistory.close`."""
    for updates, _ in _by_model(layers):
        updates.closed_steps += 1
        updates.ran = False
        updates.weights_seen.clear()
        updates.called.clear()
    close_histories([layer.amax_history for layer in layers if layer.amax_history is not None], condition=condition)


def _refuse_join() -> None:
    """Refuse a forward of ``with ddp.join()``: a rank without data left repeats DDP's collectives, and no others."""
    wrapper = DistributedDataParallel._active_ddp_module  # noqa: SLF001 (what tells of the context is private)
    if wrapper is not None and wrapper._join_config.enable:  # noqa: SLF001
        raise ConfigError(
            "delayed scaling reduces amaxes over the ranks at each step, and in DistributedDataParallel.join() a rank "
            "without data left does not take part; give every rank as many batches, or give convert "
            'amax_group="rank" for amaxes of each rank alone'
        )


def _remind_of_checkpoints(layers: Sequence[DelayedLayer]) -> None:
    """Say once that an optimizer's state was saved, for a training to resume, and scaling state was not.

    The two may be saved in either order, so it is checked before the next step.
    """
    for updates, members in _by_model(layers):
        delayed = any(layer.amax_history is not None for layer in members)
        if updates.optimizer_saved and not updates.state_read and delayed and not updates.reminded_of_state:
            updates.reminded_of_state = True
            if distributed.is_available() and distributed.is_initialized() and distributed.get_rank():
                continue  # one rank may have saved for all
            warn_caller(
                "the optimizer's state was saved without the scaling state of its model, whose layers scale from "
                "amaxes of past steps: training that resumes from it will not be the same; save "
                "octavo.scaling_state(model) too, or see octavo.compat for Trainer, Lightning and accelerate"
            )
        updates.optimizer_saved = updates.state_read = False


def _warn_of_state_not_loaded(optimizer: Optimizer, layers: Sequence[DelayedLayer]) -> None:
    """Say once that a training which goes on, by the count of its optimizer, scales from new histories.

    It is checked at the first step that ends one of these layers' steps, as a resumed training's first one does.
    """
    updates = layers[0].scale_updates
    histories = [layer.amax_history for layer in layers if layer.amax_history is not None]
    if updates.has_optimizer or updates.begins_anew or not histories:
        return
    counts = [
        optimizer.state[each].get("step", 0)
        for layer in layers
        for each in layer.parameters()
        if each in optimizer.state
    ]
    past = max(map(int, counts), default=0) - 1
    if past > 0 and not any(bool(history.steps.any()) for history in histories):
        warn_caller(
            f"the optimizer has taken {past} steps before this one, and the amax histories of its model's layers begin "
            "anew: if this resumes a training in FP8, load its scaling state too (octavo.load_scaling_state); without "
            "it the training is not the same"
        )


def _warn_of_layers_not_run(layers: Sequence[DelayedLayer]) -> None:
    """Name layers, once, that no forward has called while it called others; in compiled graphs no call is seen."""
    for updates, members in _by_model(layers):
        updates.optimizer_steps += 1
        unused = [layer.path for layer in members if layer.last_recipe is None]
        if updates.optimizer_steps != _STEPS_UNTIL_CALLED or len(unused) in (0, len(members)) or _has_compiled():
            continue
        warn_caller(
            f"{len(unused)} converted layers have not been called in {_STEPS_UNTIL_CALLED} steps and run no recipe "
            f"({', '.join(unused[:5])}{', ...' if len(unused) > 5 else ''}): something reads their weights instead, or "
            "they are unused; leave them out with convert's skip"
        )


def _has_compiled() -> bool:
    """Return whether torch.compile has made a graph in this process."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and dynamo.utils.counters["stats"]["unique_graphs"] > 0


def _mark_saved(reference: "weakref.ref[ScaleUpdates]", _: Optimizer) -> None:
    updates = reference()
    if updates is not None:
        updates.optimizer_saved = True

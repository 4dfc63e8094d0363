"""Scaling state in and out: flat dictionaries of tensors, keyed by module path and role.

    layers.0.q_proj.input.amax_history   [length] float32, newest first, -1 where there is none    delayed recipes
    layers.0.q_proj.input.amax           []       float32, what the scale is made from
    layers.0.q_proj.input.steps          []       int64, closed steps
    layers.0.q_proj.input.scale          []       float32, decodes; 0 until it is loaded           static recipes

A layer of experts has them for each, with a first dimension [experts]. They are ready for safetensors and separate from
the model's ``state_dict``. Dynamic recipes have none. A layer that is
delayed only under ``octavo.autocast`` has a history from its first training forward on.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo import recipes
from octavo.autocast import autocast_region
from octavo.caller_warnings import warn_caller
from octavo.errors import CheckpointError, ConfigError
from octavo.nn.linear import Linear
from octavo.nn.scaled_layer import ScaledLayer
from octavo.recipes import Recipe
from octavo.scaling import EMPTY, GRAD_OUTPUT, INPUT, ROLES, AmaxHistory
from octavo.scaling.scale_updates import close_over_ranks, is_written, reduces

if TYPE_CHECKING:
    from torch import distributed

__all__ = [
    "accept_new_histories",
    "discard_step",
    "load_scaling_state",
    "nonfinite_counts",
    "read_scaling_state",
    "rescale_gradient_history",
    "scaling_state",
    "update_scales",
]

_FIELDS = {"amax_history": "window", "amax": "amax", "steps": "steps"}
_RULES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "amax_history": (
        lambda x: x.isfinite() & ((x >= 0) | (x == EMPTY)),
        f"an amax is finite and not negative, or {EMPTY}",
    ),
    "amax": (lambda x: x.isfinite() & (x >= 0), "an amax is finite and not negative"),
    "steps": (lambda x: x >= 0, "a number of steps is not negative"),
    "scale": (lambda x: x.isfinite() & (x >= 0), "a scale is positive and finite, or 0 for none yet"),
}


@torch.no_grad()
def update_scales(model: torch.nn.Module, *, group: "distributed.ProcessGroup | None" = None) -> None:
    """Close the step of every delayed layer that ran: its amaxes become past, its next scales follow from them.

    Cached weights are forgotten. Call it after ``optimizer.step()`` in a model converted with
    ``scale_updates="manual"``.

    Args:
        model: the converted model.
        group: ranks that take the largest of their amaxes first, so that all of them cast alike: one MAX all-reduce
            for all tensors of the step, such as ``torch.distributed.group.WORLD``. Every rank of it calls this with
            the same layers; a tensor that ran on one of them counts as run. None: the ``amax_group`` that
            ``octavo.convert`` was given, or else the default process group if it is initialized.

    Example:
        >>> import octavo
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        >>> _ = octavo.convert(model, "delayed", scale_updates="manual")
        >>> model(torch.full((1, 4), 3.0)).sum().backward()
        >>> update_scales(model)
        >>> scaling_state(model)["0.input.amax"].item()
        3.0
    """
    close_over_ranks(list(_layers(model).values()), group=group)
    _forget_cached_weights(model)


def discard_step(model: torch.nn.Module) -> None:
    """Forget what every delayed layer recorded in the running step, which is left out or made again.

    Cached weights are forgotten too, so that the step that follows records them.

    Example:
        >>> import octavo
        >>> layer = octavo.nn.Linear(4, 4, recipe="delayed", manual_scale_updates=True)
        >>> layer(torch.ones(1, 4)).sum().backward()
        >>> discard_step(layer)
        >>> update_scales(layer)
        >>> scaling_state(layer)["input.steps"].item()
        0
    """
    for history in _histories(model).values():
        history.discard()
    _forget_cached_weights(model)


def accept_new_histories(model: torch.nn.Module) -> None:
    """Let histories begin anew although the model's optimizer has steps behind it, without a warning.

    Example:
        >>> accept_new_histories(torch.nn.Linear(2, 2))
    """
    for layer in _layers(model).values():
        layer.scale_updates.begins_anew = True


def rescale_gradient_history(model: torch.nn.Module, factor: float) -> None:
    """Multiply the amaxes of every delayed ``grad_output`` by ``factor``, because the loss scale was.

    Without it the gradients of a doubled loss scale meet scales made for half of them, and saturate. A power of two
    changes no code.

    Raises:
        ConfigError: the factor is not a positive number.

    Example:
        >>> import octavo
        >>> layer = octavo.nn.Linear(4, 4, recipe="delayed", manual_scale_updates=True)
        >>> layer(torch.ones(1, 4)).sum().backward()
        >>> update_scales(layer)
        >>> rescale_gradient_history(layer, 2.0)
        >>> scaling_state(layer)["grad_output.amax"].item()
        2.0
    """
    if not _is_positive(factor):
        raise ConfigError(f"a loss scale changes by a positive, finite factor, not {factor!r}")
    for history in _histories(model).values():
        history.rescale(GRAD_OUTPUT, factor)


@torch.no_grad()
def scaling_state(model: torch.nn.Module) -> dict[str, Tensor]:
    """Copies of every delayed and static layer's state, on the layer's device.

    With automatic updates, a step that is over counts as closed, as the next forward will find it; the micro-batches of
    one that goes on are left out. So are, with a warning, the amaxes of a step that is over where several ranks have
    still to reduce them, since this function may be called on one rank alone: training that resumes from such a state
    scales as before that step. Call :func:`update_scales` on every rank before saving.

    Example:
        >>> scaling_state(torch.nn.Linear(2, 2))
        {}
    """
    state = read_scaling_state(model)
    for layer in _layers(model).values():
        layer.scale_updates.state_read = True
    return state


@torch.no_grad()
def read_scaling_state(model: torch.nn.Module) -> dict[str, Tensor]:
    """:func:`scaling_state` for display: a checkpoint without it is still warned of.

    Example:
        >>> read_scaling_state(torch.nn.Linear(2, 2))
        {}
    """
    _follow_weights(model)
    histories = copy.deepcopy(_histories(model))
    layers = _layers(model)
    over = {id(layer.scale_updates) for layer in layers.values() if is_written(layer)}
    unreduced = False
    for path, history in histories.items():
        updates, region = layers[path].scale_updates, autocast_region()
        if reduces(updates):
            is_left = history.ends_with_blocks and 0 < int(history.region) != int(region)
            unreduced |= (is_left or id(updates) in over) and bool((history.pending != EMPTY).any())
            continue
        if id(updates) in over:
            history.close()
        history.close_if_left(region)
    if unreduced:
        _warn_of_unreduced_step()
    return {key: slot.clone() for key, slot in _slots(model, histories).items()}


def _warn_of_unreduced_step() -> None:
    warn_caller(
        "the scaling state that was read leaves out the last step: it is over, and its amaxes are reduced over the "
        "ranks only with the next training forward; for training that resumes bit for bit call "
        "octavo.update_scales(model) on every rank before octavo.scaling_state(model)"
    )


@torch.no_grad()
def load_scaling_state(
    model: torch.nn.Module, state: Mapping[str, Tensor], *, recipe: str | Recipe | None = None
) -> None:
    """Put a :func:`scaling_state` back; the running step and cached weights are forgotten.

    A longer history keeps its newest entries, and its scale becomes that of these; a shorter one is filled with none.

    Args:
        model: as it was when the state was saved.
        state: the tensors.
        recipe: for layers that are delayed only under ``octavo.autocast``: its recipe. Those that the state knows and
            that have not run yet get their history.

    Raises:
        CheckpointError: missing or unexpected keys, a tensor of the wrong shape or dtype, or a value that no state
            has; nothing is loaded then.
        ConfigError: an unknown recipe, or one that is not delayed; or the model's weights are still on the meta device.

    Example:
        >>> import octavo
        >>> layer = octavo.nn.Linear(4, 4, recipe="delayed")
        >>> layer(torch.ones(1, 4)).sum().backward()
        >>> state = scaling_state(layer)
        >>> other = octavo.nn.Linear(4, 4, recipe="delayed")
        >>> load_scaling_state(other, state)
        >>> torch.equal(scaling_state(other)["input.amax"], state["input.amax"])
        True
    """
    _follow_weights(model)
    new = {} if recipe is None else _new_histories(model, state, recipes.get(recipe))
    histories = _histories(model) | new
    slots = _slots(model, histories)
    _check_keys(slots, state)
    for key, slot in slots.items():
        if slot.is_meta:
            raise ConfigError(
                f"scaling state {key!r} would be lost: the weight of its layer is on the meta device; load the weights "
                "first, then the scaling state"
            )
        _check_tensor(key, state[key], slot)
    for key, slot in slots.items():
        if _is_window(key):
            entries = min(slot.shape[-1], state[key].shape[-1])
            slot.fill_(EMPTY)
            slot[..., :entries].copy_(state[key][..., :entries])
        else:
            slot.copy_(state[key])
    for path, history in histories.items():
        windows = [state[f"{_prefix(path)}{role}.amax_history"] for role in ROLES]
        cut = [(window[..., history.spec.length :] != EMPTY).any(-1) for window in windows]
        history.follow_window(torch.stack(cut).to(history.amax.device))
        history.discard()
    for path, layer in _layers(model).items():
        layer.keep_history(histories.get(path))
    accept_new_histories(model)
    _forget_cached_weights(model)


def nonfinite_counts(model: torch.nn.Module) -> dict[str, int]:
    """Count the NaN and ±Inf elements of each tensor in training so far, before any cast; zeros are left out.

    A recipe's casts let them through, and none of them touches a scale, so a broken tensor shows here and in its own
    rows of the results. Counted are the tensors that an FP8 recipe casts, once a call, in training mode.

    Returns:
        By module path and role, in the model's order.

    Example:
        >>> import octavo
        >>> model = torch.nn.Sequential(octavo.nn.Linear(4, 4))
        >>> model(torch.tensor([[1.0, 2.0, float("nan"), float("inf")]])).sum().backward()
        >>> nonfinite_counts(model)
        {'0.input': 2}
    """
    found = {
        f"{path}.{role}" if path else role: count
        for path, layer in _layers(model).items()
        for role, count in zip(ROLES, layer.nonfinite_counts.tolist(), strict=True)
    }
    return {key: count for key, count in found.items() if count}


def _follow_weights(model: torch.nn.Module) -> None:
    """Let the layers' state follow their weights, as their next forward would: loading may have assigned them."""
    for layer in _layers(model).values():
        layer.follow_weight()
        history, device = layer.amax_history, layer.stored_weight.device
        if history is not None and device.type != "meta" and history.amax.device != device:
            history.follow(device)


def _new_histories(model: torch.nn.Module, state: Mapping[str, Tensor], recipe: Recipe) -> dict[str, AmaxHistory]:
    """Histories of ``recipe`` for the layers that have none and that ``state`` knows."""
    if recipe.history is None:
        raise ConfigError(
            f"recipe {recipe.name!r} keeps no history, but the scaling state has one; name the delayed recipe that was "
            "trained with"
        )
    return {
        path: layer.new_history(recipe.history)
        for path, layer in _layers(model).items()
        if layer.amax_history is None and f"{_prefix(path)}{ROLES[INPUT]}.amax_history" in state
    }


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _check_keys(slots: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    missing, unexpected = sorted(slots.keys() - state.keys()), sorted(state.keys() - slots.keys())
    wrong = [
        *([f"{_counted(missing, 'is', 'are')} missing that this model has"] if missing else []),
        *([f"{_counted(unexpected, 'has', 'have')} no layer in this model"] if unexpected else []),
    ]
    if wrong:
        raise CheckpointError(
            f"the scaling state does not fit this model: {', and '.join(wrong)}; convert the model with the recipe it "
            "was saved under, or, if that was octavo.autocast's, name it: "
            "load_scaling_state(model, state, recipe=...)"
        )


def _counted(keys: Sequence[str], singular: str, plural: str) -> str:
    """Number of entries with the names of the first three, and a verb."""
    names = ", ".join(map(repr, keys[:3])) + (", ..." if len(keys) > 3 else "")
    return f"{len(keys)} {'entry' if len(keys) == 1 else 'entries'} ({names}) {singular if len(keys) == 1 else plural}"


def _check_tensor(key: str, value: object, slot: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise CheckpointError(f"scaling state {key!r} is {type(value).__name__}, expected a tensor")
    dimensions = slice(-1) if _is_window(key) else slice(None)  # a window may have another length
    if value.ndim != slot.ndim or not value.numel() or value.shape[dimensions] != slot.shape[dimensions]:
        raise CheckpointError(f"scaling state {key!r} has shape {tuple(value.shape)}, expected {tuple(slot.shape)}")
    if value.dtype is not slot.dtype:
        raise CheckpointError(f"scaling state {key!r} is {value.dtype}, expected {slot.dtype}")
    valid, rule = _RULES[key.rpartition(".")[2]]
    wrong = value[~valid(value)]
    if wrong.numel():
        raise CheckpointError(f"scaling state {key!r} holds {wrong.flatten()[0].item()}; {rule}")
    empty = value == EMPTY
    if _is_window(key) and bool((empty[..., :-1] & ~empty[..., 1:]).any()):
        raise CheckpointError(f"scaling state {key!r} holds an amax that is older than none; the newest comes first")


def _is_window(key: str) -> bool:
    return key.endswith(".amax_history")


def _forget_cached_weights(model: torch.nn.Module) -> None:
    for layer in model.modules():
        if not isinstance(layer, Linear):
            continue
        if layer.weight_cache is not None:
            layer.weight_cache.clear()
        if layer.weight_gather is not None:
            layer.weight_gather.clear()
        layer.scale_updates.weight_amaxes.generation += 1


def _layers(model: torch.nn.Module) -> dict[str, ScaledLayer]:
    return {path: module for path, module in model.named_modules() if isinstance(module, ScaledLayer)}


def _histories(model: torch.nn.Module) -> dict[str, AmaxHistory]:
    found = {path: layer.amax_history for path, layer in _layers(model).items()}
    return {path: history for path, history in found.items() if history is not None}


def _prefix(path: str) -> str:
    return f"{path}." if path else ""


def _slots(model: torch.nn.Module, histories: Mapping[str, AmaxHistory]) -> dict[str, Tensor]:
    """Views into the buffers of layers and ``histories``, under the keys of :func:`scaling_state`."""
    slots: dict[str, Tensor] = {}
    for path, layer in _layers(model).items():
        if path in histories:
            for index, role in enumerate(ROLES):
                for key, buffer in _FIELDS.items():
                    slots[f"{_prefix(path)}{role}.{key}"] = getattr(histories[path], buffer)[index]
        if layer.recipe.has_static_input:
            slots[f"{_prefix(path)}{ROLES[INPUT]}.scale"] = layer.input_scale
    return slots

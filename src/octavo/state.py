"""Scaling state in and out: flat dictionaries of tensors, keyed by module path and role.

    layers.0.q_proj.input.amax_history   [length] float32, newest first, -1 where there is none    delayed recipes
    layers.0.q_proj.input.amax           []       float32, what the scale is made from
    layers.0.q_proj.input.steps          []       int64, closed steps
    layers.0.q_proj.input.scale          []       float32, decodes; 0 until it is loaded           static recipes

They are ready for safetensors and separate from the model's ``state_dict``. Dynamic recipes have none.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from octavo.context import autocast_region
from octavo.errors import CheckpointError
from octavo.nn import Linear
from octavo.observers import EMPTY, INPUT, ROLES, AmaxHistory

__all__ = ["load_scaling_state", "nonfinite_counts", "scaling_state", "update_scales"]

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
def update_scales(model: torch.nn.Module) -> None:
    """Close the step of every delayed layer that ran: its amaxes become past, its next scales follow from them.

    Cached weights are forgotten. Call it after ``optimizer.step()`` in a model converted with
    ``scale_updates="manual"``.

    Example:
        >>> import octavo
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        >>> _ = octavo.convert(model, "delayed", scale_updates="manual")
        >>> model(torch.full((1, 4), 3.0)).sum().backward()
        >>> update_scales(model)
        >>> scaling_state(model)["0.input.amax"].item()
        3.0
    """
    for layer in _layers(model).values():
        if layer.amax_history is not None:
            layer.amax_history.close()
        if layer.weight_cache is not None:
            layer.weight_cache.clear()


@torch.no_grad()
def scaling_state(model: torch.nn.Module) -> dict[str, Tensor]:
    """Copies of every delayed and static layer's state, on the layer's device.

    With automatic updates a step that is over is closed first, as the next forward would do.

    Example:
        >>> scaling_state(torch.nn.Linear(2, 2))
        {}
    """
    for history in _histories(model).values():
        history.close_if_over(autocast_region())
    return {key: slot.clone() for key, slot in _slots(model).items()}


@torch.no_grad()
def load_scaling_state(model: torch.nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put a :func:`scaling_state` back. A longer history keeps its newest entries, a shorter one is filled with none.

    Raises:
        CheckpointError: missing or unexpected keys, a tensor of the wrong shape or dtype, or a value that no state
            has; nothing is loaded then.

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
    slots = _slots(model)
    missing, unexpected = sorted(slots.keys() - state.keys()), sorted(state.keys() - slots.keys())
    if missing or unexpected:
        raise CheckpointError(
            f"the scaling state does not fit this model: {len(missing)} keys missing {missing[:3]}, "
            f"{len(unexpected)} unexpected {unexpected[:3]}; convert the model with the recipe it was saved under"
        )
    for key, slot in slots.items():
        if not isinstance(state[key], Tensor):
            raise CheckpointError(f"scaling state {key!r} is {type(state[key]).__name__}, expected a tensor")
        if state[key].ndim != slot.ndim:
            raise CheckpointError(
                f"scaling state {key!r} has shape {tuple(state[key].shape)}, expected {tuple(slot.shape)}"
            )
        if state[key].dtype is not slot.dtype:
            raise CheckpointError(f"scaling state {key!r} is {state[key].dtype}, expected {slot.dtype}")
        valid, rule = _RULES[key.rpartition(".")[2]]
        wrong = state[key][~valid(state[key])]
        if wrong.numel():
            raise CheckpointError(f"scaling state {key!r} holds {wrong.flatten()[0].item()}; {rule}")
    for key, slot in slots.items():
        if slot.ndim:
            slot.fill_(EMPTY)
            kept = min(len(slot), len(state[key]))
            slot[:kept].copy_(state[key][:kept])
        else:
            slot.copy_(state[key])
    for history in _histories(model).values():
        history.pending.fill_(EMPTY)


def nonfinite_counts(model: torch.nn.Module) -> dict[str, int]:
    """How many NaN and ±Inf elements each tensor has held in training so far, before any cast; zeros are left out.

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


def _layers(model: torch.nn.Module) -> dict[str, Linear]:
    return {path: module for path, module in model.named_modules() if isinstance(module, Linear)}


def _histories(model: torch.nn.Module) -> dict[str, AmaxHistory]:
    found = {path: layer.amax_history for path, layer in _layers(model).items()}
    return {path: history for path, history in found.items() if history is not None}


def _slots(model: torch.nn.Module) -> dict[str, Tensor]:
    """Views into the layers' buffers, under the keys of :func:`scaling_state`."""
    slots: dict[str, Tensor] = {}
    for path, layer in _layers(model).items():
        prefix = f"{path}." if path else ""
        history = layer.amax_history
        if history is not None:
            for index, role in enumerate(ROLES):
                slots |= {f"{prefix}{role}.{key}": getattr(history, buffer)[index] for key, buffer in _FIELDS.items()}
        if layer.recipe.has_static_input:
            slots[f"{prefix}{ROLES[INPUT]}.scale"] = layer.input_scale
    return slots

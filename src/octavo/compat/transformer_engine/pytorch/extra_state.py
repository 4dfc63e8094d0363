"""Scales and amaxes of delayed scaling in Transformer Engine's checkpoints, saved as ``_extra_state``.

Transformer Engine writes a pickle, as bytes or in a uint8 tensor. A pickle can run any code, so octavo refuses it;
:func:`without_extra_state` removes it, and scaling starts anew. Plain tensors are read, from a dictionary or under
separate keys (``..._extra_state.amax_history_fwd``, as in safetensors):

| name               | shape      | columns, for each of a module's n linear layers       |
|--------------------|------------|-------------------------------------------------------|
| `amax_history_fwd` | [L, ≥ 3 n] | input, weight, output                                 |
| `amax_history_bwd` | [L, ≥ 2 n] | grad_output, grad_input                               |
| `scale_fwd`        | [≥ 3 n]    | the same; multiplies before the cast: octavo's 1 / scale |
| `scale_bwd`        | [≥ 2 n]    | the same                                              |

Row 0 of a history is the running step, the last row the newest finished one; 0 is no amax. A tensor without a name is
a history if it is [L, 3 n] or [L, 2 n]. octavo reads the three roles that it scales.

Reference: Transformer Engine's documentation, "Using FP8", section "FP8 autocasting and delayed scaling".
"""

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from octavo import nn as octavo_nn
from octavo.autocast import active_recipe
from octavo.compat.transformer_engine.common.recipe import DelayedScaling
from octavo.errors import CheckpointError
from octavo.nn.scaling_state import load_scaling_state
from octavo.recipes import Recipe
from octavo.scaling import EMPTY, ROLES

__all__ = ["read_extra_state", "without_extra_state"]

SUFFIX = "_extra_state"
_PER_LAYER = {"fwd": 3, "bwd": 2}
_COLUMN = {"input": ("fwd", 0), "weight": ("fwd", 1), "grad_output": ("bwd", 0)}
_READ = tuple(f"{kind}_{way}" for kind in ("amax_history", "scale") for way in _PER_LAYER)
_LEFT_OUT = ("scale_inv_fwd", "scale_inv_bwd")  # 1 / scale


def without_extra_state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Copy of a checkpoint without scales and amaxes; scaling starts anew.

    Example:
        >>> sorted(without_extra_state({"weight": torch.ones(1), "_extra_state": b"a pickle"}))
        ['weight']
    """
    return {key: value for key, value in checkpoint.items() if SUFFIX not in key.split(".")}


def read_extra_state(module: nn.Module, state: dict[str, Any], prefix: str, layers: Mapping[str, list[str]]) -> None:
    """Remove the extra state under ``prefix`` from ``state`` and load it into the linear layers of ``module``.

    Their histories are those of the surrounding ``autocast``'s recipe, or of a ``DelayedScaling`` of the same length.

    Args:
        module: module of this package.
        state: state_dict of a checkpoint; changed in place.
        prefix: prefix of the module's keys.
        layers: paths of the module's octavo layers, by the part of the key before ``_extra_state``.

    Raises:
        CheckpointError: a pickle, or tensors with invalid names, shapes or values; no layer is changed.
    """
    by_source: dict[str, dict[str, Tensor]] = {}
    for key in [key for key in state if key.startswith(prefix) and SUFFIX in key.split(".")]:
        source, _, name = key.removeprefix(prefix).partition(SUFFIX)
        tensors = _plain(key, state[key], name.removeprefix("."), len(layers.get(source, ())))
        if source in layers:
            by_source.setdefault(source, {}).update(tensors)
    scaled = [
        (module.get_submodule(path), _as_octavo(f"{prefix}{source}{SUFFIX}", tensors, index))
        for source, tensors in by_source.items()
        for index, path in enumerate(layers[source])
    ]
    for key in [key for key in state if key.startswith(prefix) and SUFFIX in key.split(".")]:
        del state[key]
    for layer, (roles, recipe) in scaled:
        if isinstance(layer, octavo_nn.Linear) and any(roles[f"{role}.amax"] > 0 for role in ROLES):
            load_scaling_state(layer, roles, recipe=recipe)


def _plain(key: str, value: object, name: str, layers: int) -> dict[str, Tensor]:
    """Named tensors of one entry of a module with ``layers`` linear layers; empty for an empty entry."""
    if value is None or (isinstance(value, Tensor) and not value.numel()):
        return {}
    if isinstance(value, Mapping):
        inner = [_plain(f"{key}[{name!r}]", entry, str(name), layers) for name, entry in value.items()]
        return {name: x for tensors in inner for name, x in tensors.items()}
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise CheckpointError(f"{key!r} {_description(value)}; {_ADVICE}")
    if not name and value.ndim == 2:
        name = next((f"amax_history_{way}" for way, n in _PER_LAYER.items() if value.shape[1] == n * layers), name)
    if layers and name not in _READ + _LEFT_OUT:
        raise CheckpointError(
            f"{key!r} is an unknown tensor {tuple(value.shape)}; octavo reads {', '.join(_READ)}; {_ADVICE}"
        )
    return {name: value}


_HERE = "octavo.compat.transformer_engine.pytorch.extra_state"
_ADVICE = f"load without_extra_state(checkpoint) from {_HERE} to start scaling anew"


def _description(value: object) -> str:
    if isinstance(value, Tensor | bytes | bytearray | io.IOBase):
        shown = f"{value.dtype} tensor" if isinstance(value, Tensor) else type(value).__name__
        return f"is a pickle ({shown}), which could run any code, so octavo does not open it"
    return f"is {type(value).__name__}, and octavo reads only plain tensors"


def _as_octavo(key: str, tensors: Mapping[str, Tensor], index: int) -> tuple[dict[str, Tensor], Recipe]:
    """Scaling state of one linear layer, and the recipe of its history."""
    lengths = [x.shape[0] for name, x in tensors.items() if name.startswith("amax_history") and x.ndim == 2]
    default = DelayedScaling(amax_history_len=max(lengths)) if lengths else DelayedScaling()
    recipe = active_recipe(default.octavo_recipe())
    if recipe.history is None:
        recipe = default.octavo_recipe()
    state = {}
    for role, (way, column) in _COLUMN.items():
        at = index * _PER_LAYER[way] + column
        history = _column(key, tensors, f"amax_history_{way}", 2, at)
        scale = _column(key, tensors, f"scale_{way}", 1, at)
        newest_first = _floats(0) if history is None else history[1:].flip(0)
        recorded = int(newest_first.nonzero().max()) + 1 if newest_first.any() else 0
        window = _floats(recipe.history.length if recipe.history else 0, EMPTY)
        amaxes = newest_first[:recorded][: len(window)]
        window[: len(amaxes)] = amaxes
        state[f"{role}.amax_history"] = window
        state[f"{role}.amax"] = _amax(amaxes, scale, recipe, role)
        state[f"{role}.steps"] = torch.tensor(max(recorded, int(state[f"{role}.amax"] > 0)), device="cpu")
    return state, recipe


def _floats(count: int, value: float = 0.0) -> Tensor:
    return torch.full((count,), value, dtype=torch.float32, device="cpu")


def _column(key: str, tensors: Mapping[str, Tensor], name: str, ndim: int, at: int) -> Tensor | None:
    """Column of one role in a tensor, float32 [L] or []; None if the tensor is missing."""
    if name not in tensors:
        return None
    x = tensors[name]
    if x.ndim != ndim or x.shape[-1] <= at:
        raise CheckpointError(f"{key!r}: {name} is {tuple(x.shape)}, too small for column {at}")
    column = x[..., at].detach().cpu().float()
    if not (column.isfinite() & (column >= 0)).all():
        raise CheckpointError(
            f"{key!r}: {name} holds {x[..., at].tolist()}; amaxes and scales must be finite and not negative"
        )
    return column


def _amax(window: Tensor, scale: Tensor | None, recipe: Recipe, role: str) -> Tensor:
    """Amax of the current scale: the amax of the window that gives it, or computed from the scale.

    The amax may have left the window. A scale of 1 without an amax is the initial scale.
    """
    largest = window.max() if len(window) else _floats(1)[0]
    if scale is None or scale == 0 or (scale == 1 and largest == 0):
        return largest
    gemm = recipe.grad_input if role == "grad_output" else recipe.output
    spec = gemm.b if role == "weight" else gemm.a
    assert spec is not None
    amax = spec.format.max / 2**spec.margin / scale
    close = window[(window - amax).abs() <= 2**-20 * amax]
    return close[0] if len(close) else amax

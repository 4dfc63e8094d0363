"""What Transformer Engine saves beside a module's parameters, ``_extra_state``: scales and amaxes of delayed scaling.

It writes a pickle, as bytes or inside a uint8 tensor. A pickle can run any code, so octavo never opens one: it is
refused, and :func:`without_extra_state` leaves it out, so that scaling starts anew. Plain tensors are read, from a
dictionary or under keys of their own (``..._extra_state.amax_history_fwd``, as safetensors have them):

| name               | shape      | columns, for each of a module's n linear layers       |
|--------------------|------------|-------------------------------------------------------|
| `amax_history_fwd` | [L, ≥ 3 n] | input, weight, output                                 |
| `amax_history_bwd` | [L, ≥ 2 n] | grad_output, grad_input                               |
| `scale_fwd`        | [≥ 3 n]    | the same; multiplies before the cast: octavo's 1 / scale |
| `scale_bwd`        | [≥ 2 n]    | the same                                              |

Row 0 of a history is the running step, the last row the newest finished one; 0 is no amax. A tensor without a name is a
history if it is [L, 3 n] or [L, 2 n]. octavo takes the three roles that it scales and leaves out the others.

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
from octavo.recipes import Recipe
from octavo.scaling import EMPTY, ROLES
from octavo.state import load_scaling_state

__all__ = ["read_extra_state", "without_extra_state"]

SUFFIX = "_extra_state"
_PER_LAYER = {"fwd": 3, "bwd": 2}
_COLUMN = {"input": ("fwd", 0), "weight": ("fwd", 1), "grad_output": ("bwd", 0)}
_READ = tuple(f"{kind}_{way}" for kind in ("amax_history", "scale") for way in _PER_LAYER)
_LEFT_OUT = ("scale_inv_fwd", "scale_inv_bwd")  # 1 / scale


def without_extra_state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint without its scales and amaxes; scaling starts anew.

    Example:
        >>> sorted(without_extra_state({"weight": torch.ones(1), "_extra_state": b"a pickle"}))
        ['weight']
    """
    return {key: value for key, value in checkpoint.items() if SUFFIX not in key.split(".")}


def read_extra_state(module: nn.Module, state: dict[str, Any], prefix: str, layers: Mapping[str, list[str]]) -> None:
    """Take what stands under ``prefix`` out of ``state`` and give it to the linear layers of ``module``.

    Their histories are those of the surrounding ``autocast``'s recipe, or of a ``DelayedScaling`` of the same length.

    Args:
        module: one of this package's.
        state: a checkpoint; changed in place.
        prefix: of the module.
        layers: paths of the module's octavo layers, by what comes before ``_extra_state`` in the checkpoint.

    Raises:
        CheckpointError: a pickle, or tensors of other names, shapes or values; no layer has changed then.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for key in [key for key in state if key.startswith(prefix) and SUFFIX in key.split(".")]:
        source, _, name = key.removeprefix(prefix).partition(SUFFIX)
        given = _plain(key, state[key], name.removeprefix("."), len(layers.get(source, ())))
        if source in layers:
            found.setdefault(source, {}).update(given)
    scaled = [
        (module.get_submodule(path), _as_octavo(f"{prefix}{source}{SUFFIX}", tensors, index))
        for source, tensors in found.items()
        for index, path in enumerate(layers[source])
    ]
    for key in [key for key in state if key.startswith(prefix) and SUFFIX in key.split(".")]:
        del state[key]
    for layer, (roles, recipe) in scaled:
        if isinstance(layer, octavo_nn.Linear) and any(roles[f"{role}.amax"] > 0 for role in ROLES):
            load_scaling_state(layer, roles, recipe=recipe)


def _plain(key: str, value: object, name: str, layers: int) -> dict[str, Tensor]:
    """The named tensors of one entry of a module with this many linear layers; none of an empty one."""
    if value is None or (isinstance(value, Tensor) and not value.numel()):
        return {}
    if isinstance(value, Mapping):
        inner = [_plain(f"{key}[{own!r}]", one, str(own), layers) for own, one in value.items()]
        return {named: x for one in inner for named, x in one.items()}
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise CheckpointError(f"{key!r} {_what(value)}; {_ADVICE}")
    if not name and value.ndim == 2:
        name = next((f"amax_history_{way}" for way, n in _PER_LAYER.items() if value.shape[1] == n * layers), name)
    if layers and name not in _READ + _LEFT_OUT:
        raise CheckpointError(
            f"{key!r} is a tensor {tuple(value.shape)} that octavo does not know; it reads "
            f"{', '.join(_READ)}; {_ADVICE}"
        )
    return {name: value}


_HERE = "octavo.compat.transformer_engine.pytorch.extra_state"
_ADVICE = f"load without_extra_state(checkpoint) of {_HERE}, and scaling starts anew"


def _what(value: object) -> str:
    if isinstance(value, Tensor | bytes | bytearray | io.IOBase):
        shown = f"{value.dtype} tensor" if isinstance(value, Tensor) else type(value).__name__
        return f"is a pickle ({shown}), which could run any code, and octavo does not open it"
    return f"is {type(value).__name__}, and octavo reads plain tensors alone"


def _as_octavo(key: str, tensors: Mapping[str, Tensor], index: int) -> tuple[dict[str, Tensor], Recipe]:
    """One linear layer's scaling state, and the recipe whose history it is."""
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
        kept = newest_first[:recorded][: len(window)]
        window[: len(kept)] = kept
        state[f"{role}.amax_history"] = window
        state[f"{role}.amax"] = _amax(kept, scale, recipe, role)
        state[f"{role}.steps"] = torch.tensor(max(recorded, int(state[f"{role}.amax"] > 0)), device="cpu")
    return state, recipe


def _floats(count: int, value: float = 0.0) -> Tensor:
    return torch.full((count,), value, dtype=torch.float32, device="cpu")


def _column(key: str, tensors: Mapping[str, Tensor], name: str, ndim: int, at: int) -> Tensor | None:
    """What a tensor says of one role, float32 [L] or []."""
    if name not in tensors:
        return None
    x = tensors[name]
    if x.ndim != ndim or x.shape[-1] <= at:
        raise CheckpointError(f"{key!r}: {name} is {tuple(x.shape)}, too small for column {at}")
    column = x[..., at].detach().cpu().float()
    if not (column.isfinite() & (column >= 0)).all():
        raise CheckpointError(
            f"{key!r}: {name} holds {x[..., at].tolist()}; amaxes and scales are finite, none negative"
        )
    return column


def _amax(window: Tensor, scale: Tensor | None, recipe: Recipe, role: str) -> Tensor:
    """What the current scale is made from: the amax of the window that gives it, or the scale turned round.

    The amax may have left the window. A scale of 1 without an amax is the initial one.
    """
    largest = window.max() if len(window) else _floats(1)[0]
    if scale is None or scale == 0 or (scale == 1 and largest == 0):
        return largest
    gemm = recipe.grad_input if role == "grad_output" else recipe.output
    spec = gemm.b if role == "weight" else gemm.a
    assert spec is not None
    turned = spec.format.max / 2**spec.margin / scale
    close = window[(window - turned).abs() <= 2**-20 * turned]
    return close[0] if len(close) else turned

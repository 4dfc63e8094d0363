"""Conversion of Transformer Engine's parameter names in a ``state_dict`` to octavo's.

Every module here converts them on loading, so that ``model.load_state_dict(checkpoint)`` accepts either. A row lists
the tensors whose concatenation is one of octavo's:

    self_attention.layernorm_qkv.query_weight ┐
    self_attention.layernorm_qkv.key_weight   ├ layer.self_attention.qkv.linear.weight
    self_attention.layernorm_qkv.value_weight ┘

The rows of a fused weight may be interleaved: the query heads of a group, its key head, its value head, and so on. They
are reordered to octavo's layout: all query heads, all key heads, all value heads.

``extra_state.py`` reads the scales and amaxes that a module saves in addition to its parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo.compat.transformer_engine.pytorch.extra_state import read_extra_state

__all__ = ["Heads", "ParameterRow", "attention_rows", "linear_rows", "mlp_rows", "read_names", "rename"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Interleaving of the rows of a fused weight: each of ``groups`` has ``sizes`` heads of each kind.

    Example:
        >>> Heads(groups=2, sizes=(2, 1, 1), head_dim=1).in_order(torch.arange(8)).tolist()
        [0, 1, 4, 5, 2, 6, 3, 7]
    """

    groups: int
    sizes: tuple[int, ...]
    head_dim: int

    def in_order(self, fused: Tensor) -> Tensor:
        """Reorder the rows by kind."""
        grouped = fused.unflatten(0, (self.groups, sum(self.sizes), self.head_dim))
        return torch.cat([kind.flatten(0, 2) for kind in grouped.split(self.sizes, dim=1)])


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRow:
    """Tensor ``name`` of octavo, concatenated from ``sources`` and reordered by ``heads`` if interleaved."""

    name: str
    sources: tuple[str, ...]
    heads: Heads | None = None


def linear_rows(name: str, source: str, *, norm: str | None = None) -> list[ParameterRow]:
    """Rows of a linear layer and of the norm before it, if ``norm`` is given; prefixes end with a dot or are empty."""
    rows = _pair(name, source)
    return rows if norm is None else rows + _pair(norm, f"{source}layer_norm_")


def mlp_rows(name: str, source: str) -> list[ParameterRow]:
    """Rows of a norm and two linear layers."""
    return [
        *_pair(f"{name}norm.", f"{source}layer_norm_"),
        *_pair(f"{name}fc1.", f"{source}fc1_"),
        *_pair(f"{name}fc2.", f"{source}fc2_"),
    ]


def attention_rows(
    name: str, source: str, *, cross: bool, heads: tuple[int, int], head_dim: int, interleaved: bool
) -> list[ParameterRow]:
    """Rows of an attention layer.

    Args:
        name: octavo's prefix.
        source: the checkpoint's prefix.
        cross: whether keys and values come from an encoder's output.
        heads: of queries, and of keys and values.
        head_dim: width of a head.
        interleaved: whether the rows of a fused weight are interleaved.
    """
    query_heads, groups = heads
    shares = (1, 1) if cross else (query_heads // groups, 1, 1)
    order = Heads(groups=groups, sizes=shares, head_dim=head_dim) if interleaved else None
    rows = _pair(f"{name}out.", f"{source}proj.")
    if cross:
        for layer in (f"{source}layernorm_query.", f"{source}query_layer."):
            rows += _pair(f"{name}q.norm.", f"{layer}layer_norm_")
            rows += _fused(f"{name}q.linear.", layer, ("query",), None)
        return rows + _fused(f"{name}kv.", f"{source}key_value.", ("key", "value"), order)
    for layer in (f"{source}layernorm_qkv.", f"{source}qkv."):
        rows += _pair(f"{name}qkv.norm.", f"{layer}layer_norm_")
        rows += _fused(f"{name}qkv.linear.", layer, ("query", "key", "value"), order)
    return rows


def _pair(name: str, source: str) -> list[ParameterRow]:
    return [ParameterRow(name=f"{name}{kind}", sources=(f"{source}{kind}",)) for kind in ("weight", "bias")]


def _fused(name: str, source: str, parts: Sequence[str], order: Heads | None) -> list[ParameterRow]:
    """Rows of tensors saved in parts or fused."""
    rows = []
    for kind in ("weight", "bias"):
        rows.append(ParameterRow(name=f"{name}{kind}", sources=tuple(f"{source}{part}_{kind}" for part in parts)))
        rows.append(ParameterRow(name=f"{name}{kind}", sources=(f"{source}{kind}",), heads=order))
    return rows


def read_names(module: nn.Module, rows: Sequence[ParameterRow]) -> None:
    """Make ``load_state_dict`` of ``module``, and of a model that contains it, accept Transformer Engine's names."""
    module.register_load_state_dict_pre_hook(partial(_translate, tuple(rows)))


def _translate(rows: Sequence[ParameterRow], module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    read_extra_state(module, state, prefix, _layers(module, rows))
    rename(state, prefix, rows)


def _layers(module: nn.Module, rows: Sequence[ParameterRow]) -> dict[str, list[str]]:
    """Paths of the linear layers of ``module``, by their prefix in the checkpoint."""
    layers: dict[str, list[str]] = {}
    for row in rows:
        path, _, kind = row.name.rpartition(".")
        if kind == "weight" and isinstance(module.get_submodule(path), nn.Linear):
            source = row.sources[0].rpartition(".")[0]
            paths = layers.setdefault(f"{source}." if source else "", [])
            if path not in paths:
                paths.append(path)
    return layers


def rename(state: dict[str, Any], prefix: str, rows: Sequence[ParameterRow]) -> None:
    """Replace the tensors of every row whose sources are all present, in place.

    Example:
        >>> state = {"m.fc1_weight": torch.ones(1)}
        >>> rename(state, "m.", mlp_rows("layer.", ""))
        >>> list(state)
        ['m.layer.fc1.weight']
    """
    for row in rows:
        sources = [f"{prefix}{source}" for source in row.sources]
        if all(source in state for source in sources):
            parts = [state.pop(source) for source in sources]
            joined = parts[0] if len(parts) == 1 else torch.cat(parts)
            state[f"{prefix}{row.name}"] = joined if row.heads is None else row.heads.in_order(joined)

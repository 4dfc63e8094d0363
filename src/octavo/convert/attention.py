"""Attention of a model in FP8: octavo's own modules, and those of transformers that go by its registered interface.

transformers asks a registry which function computes softmax(Q K^T · scale + mask) V. A module whose forward does so
gets a :class:`octavo.nn.DotProductAttention` without parameters as a submodule, ``fp8_attention``, and its
configuration the name of the function that calls it. There is no list of models. Kinds of attention that the function
cannot compute (scores that are capped, sinks, learned biases of positions) are refused in the first call.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.functional import check_attention_recipe
from octavo.nn import DotProductAttention
from octavo.recipes import Recipe

__all__ = ["attention_in_fp8", "convert_attention", "restore_attention"]

_CHILD = "fp8_attention"
_NAME = "octavo_fp8"  # in transformers' registry
_UNKNOWN = {
    "softcap": "caps its scores",
    "s_aux": "has sinks",
    "position_bias": "adds a bias of positions to its scores",
    "cache": "reads keys and values from pages",
}


class _InterfaceAttention(DotProductAttention):
    """The attention of one of transformers' modules; it remembers which function computed it before."""

    former: str | None = None

    def called_by(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool) -> Tensor:
        """Map transformers' [B, heads, T, D], [B, kv, S, D] to [B, T, heads, D]."""
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        self.causal = mask is None and q.shape[1] > 1 and is_causal
        if self.causal:  # a cache that is longer than what it holds, in its first call
            k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
        result: Tensor = self(q, k, v, mask=mask)
        return result


def attention_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Modules whose attention can run in FP8, by path."""
    for path, module in model.named_modules():
        is_own = isinstance(module, DotProductAttention) and not isinstance(module, _InterfaceAttention)
        if is_own or _asks_registry(type(module)):
            yield path, module


def _asks_registry(kind: type[torch.nn.Module]) -> bool:
    """Return whether a class's forward asks transformers which function computes attention."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _layer_of(module: torch.nn.Module) -> DotProductAttention | None:
    """The layer of a module of :func:`attention_modules`; None where another library's function computes attention."""
    layer = module if isinstance(module, DotProductAttention) else module._modules.get(_CHILD)  # noqa: SLF001
    return layer if isinstance(layer, DotProductAttention) else None


def attention_in_fp8(model: torch.nn.Module) -> tuple[str, ...]:
    """Paths of the modules whose attention runs a recipe."""
    layers = {path: _layer_of(module) for path, module in attention_modules(model)}
    return tuple(path for path, layer in layers.items() if layer is not None and layer.recipe is not None)


def convert_attention(model: torch.nn.Module, recipe: Recipe) -> None:
    """Run a model's attention with ``recipe``; one in high precision restores it.

    Raises:
        ConfigError: a recipe with delayed or static scales, or no attention that can run it; nothing is changed then.
    """
    if recipe.is_high_precision:
        restore_attention(model)
        return
    check_attention_recipe(recipe)
    modules: list[Any] = [module for _, module in attention_modules(model)]
    if not modules:
        raise ConfigError(
            "this model has no attention that octavo can run in FP8: it knows octavo.nn's, and that of transformers' "
            "models which use its attention interface; leave out attention"
        )
    for module in modules:  # all of them before the first name changes: they share configurations
        if _layer_of(module) is None:
            child = _InterfaceAttention(causal=False)
            child.former = module.config._attn_implementation  # noqa: SLF001 (transformers' own setting)
            module.add_module(_CHILD, child.train(module.training))
    for module in modules:
        layer = _layer_of(module)
        assert layer is not None
        layer.set_recipe(recipe)
        if layer is not module:
            _register()
            module.config._attn_implementation = _NAME  # noqa: SLF001


def restore_attention(model: torch.nn.Module) -> None:
    """Give attention the function back that computed it before."""
    for module in list(model.modules()):
        if isinstance(module, DotProductAttention):
            module.set_recipe(None)
        child = module._modules.get(_CHILD)  # noqa: SLF001
        if isinstance(child, _InterfaceAttention):
            config: Any = module.config
            config._attn_implementation = child.former  # noqa: SLF001
            del module._modules[_CHILD]  # noqa: SLF001


def _register() -> None:
    """Enter octavo's function into transformers' registry, with the masks of torch's attention."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, sdpa_mask)


def _attend(  # noqa: PLR0917 (as transformers calls it)
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Function of transformers' interface; see its ``sdpa_attention_forward``."""
    for name, words in _UNKNOWN.items():
        if others.get(name) is not None:
            raise ConfigError(
                f"{type(module).__name__} {words}, which attention in FP8 does not compute; convert without attention"
            )
    child: _InterfaceAttention = module._modules[_CHILD]  # noqa: SLF001
    child.dropout, child.scale = dropout, scaling
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal  # the argument overrides the module
    return child.called_by(query, key, value, attention_mask, is_causal=causal), None

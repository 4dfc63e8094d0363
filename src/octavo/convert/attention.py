"""Attention of a model in FP8: octavo's own modules, and those of transformers that go by its registered interface.

transformers asks a registry which function computes softmax(Q K^T · scale + mask) V. A module whose forward does so,
and whose configuration names torch's function, "sdpa", gets a :class:`octavo.nn.DotProductAttention` without parameters
as a submodule, ``fp8_attention``. In the registry octavo's function takes the place of torch's: it computes with that
submodule, and hands all other modules' calls to the function that was there. There is no list of models.

Configurations stay as they are: models share them, choose their masks by the name, and compare it with "sdpa" on their
own. DeepSeek-V3.2 hides the keys that its indexer did not choose under the names "eager" and "sdpa" alone; a function
of another name gets the indices instead. So what a module passes is what it passes to torch's function, and an
argument counts as much as it counts there. Modules that run another function stay in high precision (capped scores and
sinks have functions of their own), and those with learned biases of positions.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from octavo.convert.report import shown
from octavo.errors import ConfigError
from octavo.functional import check_attention_recipe
from octavo.nn import DotProductAttention
from octavo.recipes import Recipe

__all__ = [
    "attention_modules",
    "attention_with_recipes",
    "check_attention",
    "convert_attention",
    "reason_to_stay",
    "recipe_of",
    "restore_attention",
]

_CHILD = "fp8_attention"
_NAME = "sdpa"  # torch's function in transformers' registry
_NOT_COMPUTED = {  # keywords of a call, as far as they are not None
    "softcap": "capped scores",
    "s_aux": "sinks",
    "sinks": "sinks",
    "position_bias": "biases of positions",
    "cache": "keys and values from pages",
}


class _InterfaceAttention(DotProductAttention):
    """The attention of one of transformers' modules."""

    def __setstate__(self, state: Any) -> None:
        """As of a module; a model that is read from a file may be the first of its process."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _register()

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
    code = _code_of(kind)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _code_of(kind: type[torch.nn.Module]) -> CodeType | None:
    return getattr(inspect.unwrap(kind.forward), "__code__", None)


def reason_to_stay(module: torch.nn.Module) -> str | None:
    """Reason why a module of :func:`attention_modules` computes in high precision whatever its layer's recipe."""
    if isinstance(module, DotProductAttention):
        return None
    config: Any = module.config
    name, code = config._attn_implementation, _code_of(type(module))  # noqa: SLF001 (transformers' own setting)
    assert code is not None
    if name != _NAME:
        return (
            f'transformers computes it with "{name}", and FP8 takes the place of "{_NAME}" alone; '
            f'set_attn_implementation("{_NAME}") selects that where a model has it'
        )
    if "getattr" in code.co_names and "get_interface" not in code.co_names:  # a registry has no such attributes
        return f'{type(module).__name__} computes "eager" whatever its configuration names'
    return next((_refusal(module, each) for each in _NOT_COMPUTED if each in _words(code)), None)


def _words(code: CodeType) -> set[str]:
    """String constants of a function, among them the keywords of its calls."""
    flat = (word for each in code.co_consts for word in (each if isinstance(each, tuple) else (each,)))
    return {word for word in flat if isinstance(word, str)}


def _refusal(module: torch.nn.Module, keyword: str) -> str:
    what = _NOT_COMPUTED.get(keyword, f"{keyword}=")
    return f"{type(module).__name__} takes {what}, which attention in FP8 does not compute"


def _layer_of(module: torch.nn.Module) -> DotProductAttention | None:
    """The layer of a module of :func:`attention_modules`; None where another library's function computes attention."""
    layer = module if isinstance(module, DotProductAttention) else module._modules.get(_CHILD)  # noqa: SLF001
    return layer if isinstance(layer, DotProductAttention) else None


def attention_with_recipes(model: torch.nn.Module) -> dict[str, str | None]:
    """Find the modules whose attention has a recipe that casts.

    Returns:
        By path, the reason why a module computes in high precision all the same, or None.
    """
    return {
        path: reason_to_stay(module)
        for path, module in attention_modules(model)
        if (recipe := recipe_of(module)) is not None and not recipe.is_high_precision
    }


def recipe_of(module: torch.nn.Module) -> Recipe | None:
    """The recipe of a module of :func:`attention_modules`, if it has one."""
    layer = _layer_of(module)
    return None if layer is None else layer.recipe


def check_attention(model: torch.nn.Module, recipe: Recipe) -> None:
    """Check that a recipe can run, and that a module is there for it.

    Raises:
        ConfigError: a recipe with delayed or static scales, or no attention that can run one that casts.
    """
    if recipe.is_high_precision:
        return
    check_attention_recipe(recipe)
    reasons = {path: reason_to_stay(module) for path, module in attention_modules(model)}
    if all(reasons.values()):
        first = next((f" ({shown(path)}: {reason})" for path, reason in reasons.items()), "")
        raise ConfigError(
            f"this model has no attention that octavo can run in FP8{first}: it knows octavo.nn's, and that of "
            "transformers' models which use its attention interface; leave out attention"
        )


def convert_attention(modules: Iterable[torch.nn.Module], recipe: Recipe) -> None:
    """Run the attention of modules of :func:`attention_modules` with ``recipe``; one in high precision restores it."""
    for module in modules:
        if recipe.is_high_precision:
            restore_attention(module)
            continue
        layer = _layer_of(module)
        if layer is None:
            _register()
            layer = _InterfaceAttention(causal=False)
            module.add_module(_CHILD, layer.train(module.training))
        layer.set_recipe(recipe)


def restore_attention(model: torch.nn.Module) -> None:
    """Give attention the function back that computed it before."""
    for module in list(model.modules()):
        if isinstance(module, DotProductAttention):
            module.set_recipe(None)
        if isinstance(module._modules.get(_CHILD), _InterfaceAttention):  # noqa: SLF001
            del module._modules[_CHILD]  # noqa: SLF001


def _register() -> None:
    """Let octavo's function take the place of torch's in transformers' registry, once."""
    from transformers import AttentionInterface

    former = AttentionInterface()[_NAME]  # type: ignore[no-untyped-call]
    if not isinstance(former, partial) or former.func is not _attend:
        known = inspect.signature(_attend).parameters
        others = [name for name in inspect.signature(former).parameters if name not in known]
        AttentionInterface.register(_NAME, partial(_attend, former, (*_NOT_COMPUTED, *others)))


def _attend(  # noqa: PLR0917 (as transformers calls it)
    former: Callable[..., tuple[Tensor, None]],
    not_computed: tuple[str, ...],
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
    """Function of transformers' interface; see its ``sdpa_attention_forward``.

    Args:
        former: the function that computes the attention of modules without a layer of octavo's.
        not_computed: keywords that are refused; whatever else is among ``others`` the former function ignores too.
    """
    child = module._modules.get(_CHILD)  # noqa: SLF001
    if not isinstance(child, _InterfaceAttention):
        named = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **others}
        return former(module, query, key, value, attention_mask, **named)
    for name in not_computed:
        if others.get(name) is not None:
            raise ConfigError(f"{_refusal(module, name)}; convert without attention")
    child.dropout, child.scale = dropout, scaling
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal  # the argument overrides the module
    return child.called_by(query, key, value, attention_mask, is_causal=causal), None

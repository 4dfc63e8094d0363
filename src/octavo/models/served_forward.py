"""A decoder's forward pass around its linear layers as a server computes it, with gradients for training.

parameters         rounded to the dtype of the engine's activations (:class:`octavo.nn.rounded_parameters`)
keys and values    those that attention reads have been through the engine's cache, after rotary embedding
"""

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from inspect import signature
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from octavo.convert import other_modules
from octavo.errors import ConfigError
from octavo.models.cache_transforms import KVTransform, cache_of_transformers
from octavo.models.llama import Attention, SelfAttention
from octavo.nn.parameter_rounding import rounded_parameters
from octavo.numerics import EngineCast, Scaling, quantize_as
from octavo.recipes.engines import EngineProfile

__all__ = ["cast_of_cache", "check_linear_layers", "is_skipped", "served_forward"]

CACHE = "past_key_values"


class served_forward(AbstractContextManager[None]):  # noqa: N801 (a context, named as torch.no_grad)
    """Context in which a decoder computes as an engine does around its linear layers; can be entered again.

    Gradients pass straight through the cast of keys and values. A backward pass that repeats the forward, as activation
    checkpointing does, has to run inside it.

    Args:
        model: octavo's Llama, or a model of transformers; in any wrapper.
        profile: the engine.

    Raises:
        ConfigError: weights that the profile casts are no linear layers'; it casts keys and values, and the model's are
            not known; or the context is entered while active.
    """

    def __init__(self, model: nn.Module, profile: EngineProfile) -> None:
        check_linear_layers(model, profile)
        self._parameters = rounded_parameters(model, profile.activations)
        self._model, self._cast = model, profile.kv_cache
        self._hooks = ExitStack()
        if self._cast is not None and not _readers(model):
            raise ConfigError(
                f"{profile.name} casts keys and values, and octavo knows where those of its own Llama and of "
                f"transformers' decoders are, not of a {type(model).__name__}"
            )

    def __enter__(self) -> None:
        self._parameters.__enter__()
        if self._cast is None:
            return
        transform = cast_of_cache(self._cast)
        for module in _readers(self._model):
            hook = _CastOfAttention(transform) if isinstance(module, SelfAttention) else _CastOfModel(transform)
            self._hooks.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.close()
        self._parameters.__exit__(kind, error, trace)


def is_skipped(path: str, profile: EngineProfile) -> bool:
    """Whether a profile leaves a module in high precision."""
    return any(fnmatchcase(path, each) for each in profile.skipped)


def check_linear_layers(model: nn.Module, profile: EngineProfile) -> None:
    """Raise ConfigError for weights outside linear layers, such as fused experts', unless they are skipped."""
    others = [path for path in other_modules(model) if not is_skipped(path, profile)]
    if others:
        raise ConfigError(
            f"{profile.name} is computed of linear layers, and {', '.join(others[:2])}"
            f"{f' and {len(others) - 2} more' if len(others) > 2 else ''} have weights of another kind: give experts "
            "layers of their own by octavo.convert.unfuse_experts (before making the optimizer), or name the modules "
            "in the profile's skipped"
        )


def cast_of_cache(cast: EngineCast) -> KVTransform:
    """Keys and values as attention reads them from a cache in FP8, of whose static casts the scale is 1.

    Example:
        >>> through = cast_of_cache(EngineCast(scaling=Scaling.STATIC))
        >>> keys = torch.tensor([1.06, 500.0])
        >>> through(0, keys, keys)[1]
        tensor([  1., 448.])
    """

    def through(_: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return _Cast.apply(keys, cast), _Cast.apply(values, cast)  # type: ignore[no-untyped-call]

    return through


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cast: EngineCast) -> Tensor:
        scale = torch.ones((), device=x.device) if cast.scaling is Scaling.STATIC else None  # without one in a folder
        return quantize_as(x, cast, scale=scale).dequantize()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _readers(model: nn.Module) -> list[nn.Module]:
    """The attentions of octavo's decoder; or the outermost module of transformers that takes a cache."""
    modules = list(model.modules())
    attentions: list[nn.Module] = [module for module in modules if isinstance(module, SelfAttention)]
    return attentions or [module for module in modules if CACHE in signature(type(module).forward).parameters][:1]


@dataclass(frozen=True, slots=True)
class _CastOfAttention:
    """Hook before :class:`octavo.models.llama.SelfAttention`."""

    transform: KVTransform

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        bound = signature(SelfAttention.forward).bind(module, *args, **kwargs)
        bound.apply_defaults()
        attention: Attention = bound.arguments["attention"]

        def through_cache(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return attention(queries, *self.transform(0, keys, values))

        return tuple(bound.args[1:4]), {"attention": through_cache}


@dataclass(frozen=True, slots=True)
class _CastOfModel:
    """Hook before a model of transformers, whose attention reads what its cache returns."""

    transform: KVTransform

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if signature(type(module).forward).bind(module, *args, **kwargs).arguments.get(CACHE) is not None:
            raise ConfigError("keys and values go through the engine's cache here; call the model without one")
        if module.training and any(getattr(each, "gradient_checkpointing", False) for each in module.modules()):
            raise ConfigError(
                "transformers repeats a layer's forward without its cache, so keys and values would not be cast; turn "
                "gradient checkpointing off, or use a profile without an FP8 cache"
            )
        return args, {**kwargs, CACHE: cache_of_transformers(self.transform), "use_cache": True}

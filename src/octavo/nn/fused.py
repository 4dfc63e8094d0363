"""A linear layer and what stands before it, without the tensor between them.

``norm_then_linear`` is ``linear(norm(x))`` and ``activation_then_linear`` is ``linear(activation(x))``. Where a kernel
takes them (:func:`unfused_reason` says why not), the result of the norm or activation is cast before it leaves the
kernel: only its codes reach memory, and x is what the backward pass keeps. The linear layer is given a *placeholder*, a
tensor of the result's shape and dtype that holds no values and no memory; it takes the gradient and is never read.

Recipe, scales, histories, counts and hooks are those of the two layers one after the other.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from octavo.functional import InputOperands
from octavo.kernels import ScaleRule, fused
from octavo.kernels.result_cast import CastResult, NormSpec, ResultCast
from octavo.nn.activations import ACTIVATIONS
from octavo.nn.linear import Linear, autocast_dtype
from octavo.nn.norms import LayerNorm, RMSNorm
from octavo.numerics import PerTensor
from octavo.observers import RoleTap, inside_backward
from octavo.recipes import CastSpec, Recipe, Scaling

__all__ = ["activation_then_linear", "norm_then_linear", "unfused_reason"]

_HOOKS = ("forward", "forward_pre", "backward", "backward_pre")
# A gated activation and the function of its gate.
_GATED = {
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "qgeglu": "qgelu",
    "reglu": "relu",
    "sreglu": "srelu",
    "swiglu": "silu",
}


def norm_then_linear(norm: nn.Module, linear: nn.Module, x: Tensor) -> Tensor:
    """``linear(norm(x))``.

    Example:
        >>> norm, linear = RMSNorm(8), Linear(8, 4)
        >>> x = torch.randn(2, 8)
        >>> torch.equal(norm_then_linear(norm, linear, x), linear(norm(x)))
        True
    """
    if unfused_reason(x, linear, norm) is not None:
        y: Tensor = linear(norm(x))
        return y
    assert isinstance(norm, LayerNorm | RMSNorm)
    bias = norm.bias if isinstance(norm, LayerNorm) else None
    spec = NormSpec(layer=isinstance(norm, LayerNorm), eps=norm.eps, zero_centered=norm.zero_centered)
    learns = any(t is not None and t.requires_grad for t in (x, norm.weight, bias))

    def make(cast: ResultCast, amax: Tensor | None, scale: Tensor | None) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = _CastNorm.apply(  # type: ignore[no-untyped-call]
            x, norm.weight, bias, spec, cast, autocast_dtype(x), amax, scale
        )
        return made

    return _multiply(linear, make, autocast_dtype(x), learns=learns)


def activation_then_linear(activation: str, linear: nn.Module, x: Tensor) -> Tensor:
    """``linear(ACTIVATIONS[activation](x))``."""
    gated = ACTIVATIONS[activation].gated
    if unfused_reason(x, linear, halves=2 if gated else 1) is not None:
        y: Tensor = linear(ACTIVATIONS[activation](x))
        return y
    function = _GATED.get(activation, activation)

    def make(cast: ResultCast, amax: Tensor | None, scale: Tensor | None) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = _CastActivation.apply(  # type: ignore[no-untyped-call]
            x, function, gated, cast, amax, scale
        )
        return made

    return _multiply(linear, make, x.dtype, learns=x.requires_grad)


def unfused_reason(x: Tensor, linear: nn.Module, norm: nn.Module | None = None, *, halves: int = 1) -> str | None:
    """Why a linear layer and what stands before it run one after the other; None where one kernel serves.

    Args:
        x: what the norm or activation reads.
        linear: the layer that reads its result.
        norm: the norm, if it is one.
        halves: 2 for an activation with a gate, which reads twice the width that it returns.
    """
    return next(_objections(x, linear, norm, halves), None)


def _objections(x: Tensor, linear: nn.Module, norm: nn.Module | None, halves: int) -> Iterator[str]:
    if (reason := fused.wrong_place_reason(x)) is not None:
        yield reason
    if not isinstance(linear, Linear) or (norm is not None and not isinstance(norm, LayerNorm | RMSNorm)):
        yield "one of the two layers was replaced"
        return
    if any(_is_watched(layer) for layer in (linear, norm) if layer is not None):
        yield "one of the two layers has hooks, or another forward, which see what stands between them"
    if not all(_is_plain(t) for t in (x, None if norm is None else norm.weight)):
        yield "the kernels take plain tensors"
    if x.ndim == 0 or x.shape[-1] != linear.in_features * halves or (norm is not None and norm.size != x.shape[-1]):
        yield f"the layers refuse inputs {tuple(x.shape)}"
        return
    recipe = linear.recipe_now()
    if recipe.output.a is None:
        yield f"recipe {recipe.name!r} casts no input"
        return
    yield from _cast_objections(recipe, recipe.output.a, transpose=_transposes(linear))
    if autocast_dtype(x) is not x.dtype and (norm is None or x.dtype is not torch.float32):
        yield f"{x.dtype} is rounded to {autocast_dtype(x)} between the two layers"
    longest = fused.LONGEST_LAYERNORM if isinstance(norm, LayerNorm) else fused.LONGEST_ROW
    cast = _result_cast(recipe.output.a, transpose=_transposes(linear))
    if (reason := fused.no_kernel_reason(x, linear.in_features, cast, longest=longest)) is not None:
        yield reason


def _cast_objections(recipe: Recipe, spec: CastSpec, *, transpose: bool) -> Iterator[str]:
    if transpose and recipe.grad_weight.b != spec:
        yield f"recipe {recipe.name!r} casts the input in another way for grad_weight"
    if recipe.is_delayed and not isinstance(spec.granularity, PerTensor):
        yield "a history needs the amax of the whole tensor"


def _is_watched(layer: nn.Module) -> bool:
    """Whether others see the layer's calls: hooks, another class (parametrizations, sharding), another forward."""
    every_module = nn.modules.module
    hooks = [getattr(layer, f"_{kind}_hooks") for kind in _HOOKS]
    hooks += [getattr(every_module, f"_global_{kind}_hooks") for kind in _HOOKS]
    return any(hooks) or type(layer) not in {Linear, LayerNorm, RMSNorm} or "forward" in vars(layer)


def _is_plain(x: Tensor | None) -> bool:
    return x is None or type(x) in {Tensor, nn.Parameter}


def _transposes(linear: Linear) -> bool:
    """Whether the weight's gradient will read the input."""
    return linear.weight.requires_grad and torch.is_grad_enabled()


def _result_cast(spec: CastSpec, *, transpose: bool) -> ResultCast:
    return ResultCast(
        format=spec.format,
        granularity=spec.granularity,
        rule=ScaleRule(spec.scale_rounding, spec.amax_floor, spec.margin),
        scale_format=spec.scale_format,
        nonfinite=spec.nonfinite,
        transpose=transpose,
    )


def _multiply(
    linear: nn.Module,
    make: Callable[[ResultCast, Tensor | None, Tensor | None], tuple[Tensor, ...]],
    hp_dtype: torch.dtype,
    *,
    learns: bool,
) -> Tensor:
    """``linear`` of the placeholder and the operands that ``make`` makes with the layer's scales."""
    assert isinstance(linear, Linear)
    recipe = linear.recipe_now()
    spec = recipe.output.a
    assert spec is not None
    cast = _result_cast(spec, transpose=_transposes(linear))

    def cast_input(tap: RoleTap) -> tuple[Tensor, InputOperands]:
        amax = tap.amax if spec.scaling == Scaling.DELAYED else None
        scale = tap.scale if spec.scaling == Scaling.STATIC else None
        placeholder, *written = make(cast, amax, scale)
        made = CastResult(*written)
        if inside_backward():  # activation checkpointing computes the call again: what it saw is counted already
            tap.nonfinite = None
        with torch.no_grad():
            tap.record(placeholder, made.measurement())
        return placeholder, InputOperands(*made.operands(cast, hp_dtype, scale))

    return linear.forward_cast(recipe, cast_input, learns=learns)


def _placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor that is never read: one element of memory for all."""
    return torch.empty((), dtype=dtype, device=device).expand(shape)


class _CastNorm(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 (autograd.Function takes no keywords)
        ctx: Any,
        x: Tensor,
        gain: Tensor,
        bias: Tensor | None,
        norm: NormSpec,
        cast: ResultCast,
        handed_on: torch.dtype,
        amax: Tensor | None,
        scale: Tensor | None,
    ) -> tuple[Tensor, ...]:
        rows, gain = x.reshape(-1, x.shape[-1]).contiguous(), gain.contiguous()
        bias = None if bias is None else bias.contiguous()
        made, mean, rstd = fused.cast_norm(rows, gain, bias, norm, cast, handed_on=handed_on, amax=amax, scale=scale)
        ctx.save_for_backward(rows, gain, mean, rstd)
        ctx.norm, ctx.shape, ctx.bias_dtype = norm, x.shape, None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*made)
        return _placeholder(x.shape, handed_on, x.device), *made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        rows, gain, mean, rstd = ctx.saved_tensors
        if grad is None:
            return (None,) * 8
        grad_x, grad_gain, grad_bias = fused.norm_backward(
            grad.reshape(rows.shape).contiguous(), rows, gain, mean, rstd, ctx.norm, has_bias=ctx.bias_dtype is not None
        )
        bias = None if ctx.bias_dtype is None else grad_bias.to(ctx.bias_dtype)
        return grad_x.reshape(ctx.shape), grad_gain.to(gain.dtype), bias, *(None,) * 5


class _CastActivation(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 (autograd.Function takes no keywords)
        ctx: Any,
        x: Tensor,
        function: str,
        gated: bool,
        cast: ResultCast,
        amax: Tensor | None,
        scale: Tensor | None,
    ) -> tuple[Tensor, ...]:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        made = fused.cast_activation(rows, function, cast, gated=gated, amax=amax, scale=scale)
        ctx.save_for_backward(rows)
        ctx.function, ctx.gated, ctx.shape = function, gated, x.shape
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*made)
        shape = torch.Size([*x.shape[:-1], made.codes.shape[1]])
        return _placeholder(shape, x.dtype, x.device), *made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        if grad is None:
            return (None,) * 6
        flat = grad.reshape(rows.shape[0], -1).contiguous()
        grad_x = fused.activation_backward(flat, rows, ctx.function, gated=ctx.gated)
        return grad_x.reshape(ctx.shape), *(None,) * 5

"""A linear layer fused with the norm or activation before it, without the tensor between them.

``norm_then_linear`` is ``linear(norm(x))`` and ``activation_then_linear`` is ``linear(activation(x))``. Where a kernel
takes them (:func:`unfused_reason` says why not), the result of the norm or activation is cast before it leaves the
kernel: only its codes reach memory. The backward pass keeps x, and casts the transpose that the weight's gradient needs
with the same amax. The linear layer is given a *placeholder*, a tensor of the result's shape and
dtype that holds no values and no memory; it takes the gradient and is never read.

Recipe, scales, histories, counts and hooks are those of the two layers one after the other.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from octavo.functional import InputOperands
from octavo.functional.saved_operands import RecomputedOperand
from octavo.kernels import fused_casts
from octavo.kernels.result_cast import NormSpec, ResultBuffers, ResultCast
from octavo.nn.activations import ACTIVATIONS
from octavo.nn.fp8_weight import FP8WeightLinear
from octavo.nn.linear import Linear
from octavo.nn.norms import LayerNorm, RMSNorm
from octavo.nn.scaled_layer import autocast_dtype
from octavo.numerics import PerTensor
from octavo.recipes import CastSpec, Recipe, Scaling
from octavo.scaling import Operand, OperandScaling, inside_backward

__all__ = ["activation_then_linear", "norm_then_linear", "unfused_reason"]

_LINEARS, _NORMS = frozenset({Linear, FP8WeightLinear}), frozenset({LayerNorm, RMSNorm})
_PLAIN = frozenset({Tensor, nn.Parameter})
_UNGATED = {each.function: name for name, each in ACTIVATIONS.items() if not each.gated}
_FUNCTION = {name: _UNGATED[each.function] for name, each in ACTIVATIONS.items()}  # swiglu's is silu


class _Plan(NamedTuple):
    """Plan by which one kernel replaces two layers."""

    recipe: Recipe
    spec: CastSpec
    cast: ResultCast
    result_dtype: torch.dtype  # dtype to which the result is rounded before it is cast


def norm_then_linear(norm: nn.Module, linear: nn.Module, x: Tensor) -> Tensor:
    """``linear(norm(x))``.

    Example:
        >>> norm, linear = RMSNorm(8), Linear(8, 4)
        >>> x = torch.randn(2, 8)
        >>> torch.equal(norm_then_linear(norm, linear, x), linear(norm(x)))
        True
    """
    plan = _plan(x, linear, norm)
    if isinstance(plan, str):
        y: Tensor = linear(norm(x))
        return y
    assert isinstance(norm, LayerNorm | RMSNorm)
    x = x.contiguous()  # once, for the two that keep it
    weight, bias = norm.weight, norm.bias if isinstance(norm, LayerNorm) else None
    spec = NormSpec(layer=isinstance(norm, LayerNorm), eps=norm.eps, zero_centered=norm.zero_centered)

    def make(cast: ResultCast, amax: Tensor | None, scale: Tensor | None) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = _CastNorm.apply(  # type: ignore[no-untyped-call]
            x, weight, bias, spec, cast, plan.result_dtype, amax, scale
        )
        return made

    learns = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    recompute = _RecomputeNorm(spec, _alone(plan.cast), plan.result_dtype)
    return _multiply(linear, plan, make, RecomputedOperand(recompute, (x, weight, bias)) if learns else None)


def activation_then_linear(activation: str, linear: nn.Module, x: Tensor) -> Tensor:
    """``linear(ACTIVATIONS[activation](x))``."""
    gated = ACTIVATIONS[activation].gated
    plan = _plan(x, linear, halves=2 if gated else 1)
    if isinstance(plan, str):
        y: Tensor = linear(ACTIVATIONS[activation](x))
        return y
    x = x.contiguous()  # once, for the two that keep it

    def make(cast: ResultCast, amax: Tensor | None, scale: Tensor | None) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = _CastActivation.apply(  # type: ignore[no-untyped-call]
            x, _FUNCTION[activation], gated, cast, amax, scale
        )
        return made

    recompute = _RecomputeActivation(_FUNCTION[activation], gated, _alone(plan.cast))
    return _multiply(linear, plan, make, RecomputedOperand(recompute, (x,)) if x.requires_grad else None)


def unfused_reason(x: Tensor, linear: nn.Module, norm: nn.Module | None = None, *, halves: int = 1) -> str | None:
    """Reason why a linear layer and the norm or activation before it are not fused; None where they are.

    Args:
        x: input of the norm or activation.
        linear: the layer that reads its result.
        norm: the norm, if it is one.
        halves: 2 for an activation with a gate, which reads twice the width that it returns.
    """
    plan = _plan(x, linear, norm, halves=halves)
    return plan if isinstance(plan, str) else None


def _plan(x: Tensor, linear: nn.Module, norm: nn.Module | None = None, *, halves: int = 1) -> _Plan | str:
    """Plan of the fused call, or the reason why there is none. Every eager call computes it in microseconds."""
    reason = fused_casts.wrong_place_reason(x) or next(_unsupported_layer_reasons(x, linear, norm, halves), None)
    if reason is not None:
        return reason
    assert isinstance(linear, Linear)
    recipe = linear.recipe_now()
    spec = recipe.output.a
    if spec is None:
        return f"recipe {recipe.name!r} casts no input"
    transpose = linear.stored_weight.requires_grad and torch.is_grad_enabled()  # the weight's gradient will read it
    plan = _Plan(recipe, spec, ResultCast(spec=spec, transpose=transpose), autocast_dtype(x))
    longest = fused_casts.LONGEST_LAYERNORM if isinstance(norm, LayerNorm) else fused_casts.LONGEST_ROW
    reason = fused_casts.no_kernel_reason(x, linear.in_features, plan.cast, longest=longest)
    return reason or next(_unsupported_plan_reasons(x, plan, from_norm=norm is not None), plan)


def _unsupported_layer_reasons(x: Tensor, linear: nn.Module, norm: nn.Module | None, halves: int) -> Iterator[str]:
    if not _is_itself(linear, _LINEARS) or not (norm is None or _is_itself(norm, _NORMS)):
        yield "one of the two layers was replaced, or has hooks or another forward, which see what stands between them"
        return
    assert isinstance(linear, Linear)
    assert norm is None or isinstance(norm, LayerNorm | RMSNorm)
    if nn.modules.module._has_any_global_hook():  # noqa: SLF001
        yield "hooks of every module see what stands between the two layers"
    elif linear.watch is not None:
        yield "the doctor looks at what stands between the two layers"
    elif type(x) not in _PLAIN or (norm is not None and type(norm.weight) not in _PLAIN):
        yield "the kernels take plain tensors"
    elif x.ndim == 0 or x.shape[-1] != linear.in_features * halves or (norm is not None and norm.size != x.shape[-1]):
        yield f"the layers refuse inputs {tuple(x.shape)}"


def _unsupported_plan_reasons(x: Tensor, plan: _Plan, *, from_norm: bool) -> Iterator[str]:
    recipe, spec, cast, result_dtype = plan
    if cast.transpose and recipe.grad_weight.b != spec:
        yield f"recipe {recipe.name!r} casts the input in another way for grad_weight"
    if recipe.is_delayed and not isinstance(spec.granularity, PerTensor):
        yield "a history needs the amax of the whole tensor"
    if result_dtype is not x.dtype and not (from_norm and x.dtype is torch.float32):
        yield f"{x.dtype} is rounded to {result_dtype} between the two layers"


def _is_itself(layer: nn.Module, types: frozenset[type]) -> bool:
    """Return whether its calls can be skipped: no parametrization or sharding, no replaced forward, no hooks."""
    attributes = vars(layer)
    if type(layer) not in types or "forward" in attributes:
        return False
    before, after = attributes["_forward_pre_hooks"], attributes["_forward_hooks"]
    return not (before or after or attributes["_backward_pre_hooks"] or attributes["_backward_hooks"])


def _multiply(
    linear: nn.Module,
    plan: _Plan,
    make: Callable[[ResultCast, Tensor | None, Tensor | None], tuple[Tensor, ...]],
    transposed: RecomputedOperand | None,
) -> Tensor:
    """Call ``linear`` with the placeholder and the operands that ``make`` returns for the layer's scales.

    ``transposed`` is recomputed in backward; None if no tensors are saved for it.
    """
    assert isinstance(linear, Linear)
    recipe, spec, cast, result_dtype = plan
    recomputed = transposed if cast.transpose else None
    forward_cast = cast if recomputed is None else replace(cast, transpose=False)

    def cast_input(scaling: OperandScaling) -> tuple[Tensor, InputOperands]:
        amax = scaling.amax if spec.scaling == Scaling.DELAYED else None
        scale = scaling.scale if spec.scaling == Scaling.STATIC else None
        placeholder, *written = make(forward_cast, amax, scale)
        result = ResultBuffers(*written).result(forward_cast, result_dtype, scale)
        assert result.measurement is not None
        if inside_backward():  # activation checkpointing repeats the call, whose elements are counted already
            scaling.nonfinite = None
        with torch.no_grad():
            scaling.record(placeholder, result.measurement)
        if recomputed is None:
            return placeholder, InputOperands(result.output, result.transposed)
        if amax is None and isinstance(spec.granularity, PerTensor):
            amax = result.measurement.amax
        tensors = (*recomputed.tensors, amax, scale)
        return placeholder, InputOperands(
            result.output, RecomputedOperand(recomputed.recompute, tuple(map(_detached, tensors)))
        )

    return linear.forward_cast(recipe, cast_input)


def _alone(cast: ResultCast) -> ResultCast:
    """The cast of the transpose by itself."""
    return replace(cast, direct=False)


def _detached(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


@dataclass(frozen=True, slots=True)
class _RecomputeNorm:
    norm: NormSpec
    cast: ResultCast
    result_dtype: torch.dtype

    def compute(self, *tensors: Tensor | None) -> Operand:
        x, gain, bias, amax, scale = tensors
        assert x is not None
        assert gain is not None
        rows, bias = _rows(x), None if bias is None else bias.contiguous()
        made, *_ = fused_casts.cast_norm(
            rows, gain.contiguous(), bias, self.norm, self.cast, result_dtype=self.result_dtype, amax=amax, scale=scale
        )
        return _transposed(made, self.cast, self.result_dtype, scale)


@dataclass(frozen=True, slots=True)
class _RecomputeActivation:
    function: str
    gated: bool
    cast: ResultCast

    def compute(self, *tensors: Tensor | None) -> Operand:
        x, amax, scale = tensors
        assert x is not None
        made = fused_casts.cast_activation(_rows(x), self.function, self.cast, gated=self.gated, amax=amax, scale=scale)
        return _transposed(made, self.cast, x.dtype, scale)


def _transposed(buffers: ResultBuffers, cast: ResultCast, hp_dtype: torch.dtype, scale: Tensor | None) -> Operand:
    transposed = buffers.result(cast, hp_dtype, scale).transposed
    assert transposed is not None
    return transposed


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


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
        result_dtype: torch.dtype,
        amax: Tensor | None,
        scale: Tensor | None,
    ) -> tuple[Tensor, ...]:
        rows, gain = _rows(x), gain.contiguous()
        bias = None if bias is None else bias.contiguous()
        buffers, mean, rstd = fused_casts.cast_norm(
            rows, gain, bias, norm, cast, result_dtype=result_dtype, amax=amax, scale=scale
        )
        ctx.save_for_backward(rows, gain, mean, rstd)
        ctx.norm, ctx.shape, ctx.bias_dtype = norm, x.shape, None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*buffers)
        return _placeholder(x.shape, result_dtype, x.device), *buffers

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        rows, gain, mean, rstd = ctx.saved_tensors
        if grad is None:
            return (None,) * 8
        grad_x, grad_gain, grad_bias = fused_casts.norm_backward(
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
        rows = _rows(x)
        buffers = fused_casts.cast_activation(rows, function, cast, gated=gated, amax=amax, scale=scale)
        ctx.save_for_backward(rows)
        ctx.function, ctx.gated, ctx.shape = function, gated, x.shape
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*buffers)
        shape = torch.Size([*x.shape[:-1], buffers.codes.shape[1]])
        return _placeholder(shape, x.dtype, x.device), *buffers

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        if grad is None:
            return (None,) * 6
        flat = grad.reshape(rows.shape[0], -1).contiguous()
        grad_x = fused_casts.activation_backward(flat, rows, ctx.function, gated=ctx.gated)
        return grad_x.reshape(ctx.shape), *(None,) * 5

"""The linear layer in FP8: cast each operand by its role, then multiply three times.

Forward casts input and weight and multiplies them. What backward needs is decided there too: not the high-precision
tensors but codes and scales, one byte an element. Where a recipe casts a tensor the same way for both of its GEMMs,
and its scaling groups do not depend on the orientation, one cast serves both: three quantizations a step for a
tensorwise recipe, not six.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo.kernels import high_precision_mm, quantize, scaled_mm
from octavo.numerics import QuantizedTensor, measure
from octavo.observers import GRAD_OUTPUT, INPUT, ROLES, WEIGHT, RoleTap, inside_backward
from octavo.recipes import CastSpec, GemmSpec, Recipe, Scaling

__all__ = ["cast_operand", "fp8_linear"]

Operand = QuantizedTensor | Tensor  # a Tensor where the recipe leaves the GEMM in high precision


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    *,
    amaxes: Tensor | None = None,
    pending: Tensor | None = None,
    nonfinite: Tensor | None = None,
) -> Tensor:
    """``x @ weight.T + bias``, its GEMMs and those of its backward as ``recipe`` says.

    Args:
        x: [..., K]; float16, bfloat16 or float32 (float64 is computed in float32).
        weight: [N, K], any of these dtypes: a float32 master weight is quantized from its float32 values.
        bias: [N] or None; added in FP32 before the output is rounded.
        recipe: the casts and GEMMs.
        amaxes: [3] float32, for input, weight and grad_output, what delayed scales are made from; where it is 0, or
            without it, a delayed cast measures its own tensor.
        pending: [3] float32, raised to the amaxes of the three tensors, grad_output's in backward; a weight that takes
            no gradient keeps its own.
        nonfinite: [3] int64, raised by the numbers of their NaN and ±Inf elements.

    Returns:
        [..., N] in ``x``'s dtype. Gradients have the dtypes of their tensors. A NaN or ±Inf in ``x`` shows in its own
        rows.

    Example:
        >>> from octavo import recipes
        >>> x, weight = torch.ones(2, 4), torch.ones(3, 4, requires_grad=True)
        >>> y = fp8_linear(x, weight, None, recipes.get("tensorwise"))
        >>> y.sum().backward()
        >>> torch.allclose(y, torch.full((2, 3), 4.0)), torch.allclose(weight.grad, torch.full((3, 4), 2.0))
        (True, True)
    """
    rows = x.reshape(-1, x.shape[-1])
    computed = rows.float() if x.dtype is torch.float64 else rows
    y: Tensor = _ScaledLinear.apply(computed, weight, bias, recipe, amaxes, pending, nonfinite)  # type: ignore[no-untyped-call]
    return y.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def cast_operand(x: Tensor, spec: CastSpec | None, tap: RoleTap | None = None) -> Operand:
    """``x`` as one operand of a GEMM.

    Args:
        x: a matrix whose last dimension the GEMM sums over.
        spec: how to cast; None leaves ``x`` as it is.
        tap: records what is measured, and gives a delayed cast what its scale is made from; where that is 0 or there
            is no tap, ``x``'s own amax is used.
    """
    if spec is None:
        return x
    found = measure(x.detach(), spec.granularity)
    amax = None
    if tap is not None:
        tap.record(x, found)
        if spec.scaling == Scaling.DELAYED and tap.amax is not None:
            amax = torch.where(tap.amax > 0, tap.amax, found.amax)
    return quantize(
        x,
        spec.format,
        granularity=spec.granularity,
        amax=amax,
        power_of_two=spec.power_of_two,
        amax_floor=spec.amax_floor,
        margin=spec.margin,
        nonfinite=spec.nonfinite,
        measurement=found,
    )


class _ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 (autograd.Function takes no keywords)
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        recipe: Recipe,
        amaxes: Tensor | None,
        pending: Tensor | None,
        nonfinite: Tensor | None,
    ) -> Tensor:
        needs_grad_input, needs_grad_weight, *_ = ctx.needs_input_grad
        taps = [_tap(role, amaxes, pending, nonfinite) for role in range(len(ROLES))]
        if not needs_grad_weight:
            taps[WEIGHT].pending = None
        if inside_backward():  # activation checkpointing computes the call again: what it saw is counted already
            taps[INPUT].nonfinite = taps[WEIGHT].nonfinite = None
        input_operand = cast_operand(x, recipe.output.a, taps[INPUT])
        weight_operand = cast_operand(weight, recipe.output.b, taps[WEIGHT])
        kept: list[Operand | None] = [None, None]
        if needs_grad_input:
            kept[0] = _transposed(weight_operand, weight, recipe.output.b, recipe.grad_input.b, taps[WEIGHT])
        if needs_grad_weight:
            kept[1] = _transposed(input_operand, x, recipe.output.a, recipe.grad_weight.b, taps[INPUT])
        _keep(ctx, kept, amaxes)
        ctx.recipe, ctx.recorded = recipe, (pending, nonfinite)
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return _multiply(input_operand, weight_operand, recipe.output, x.dtype, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        recipe: Recipe = ctx.recipe
        input_dtype, weight_dtype, bias_dtype = ctx.dtypes
        (weight_t, input_t), amaxes = _kept(ctx)
        tap = _tap(GRAD_OUTPUT, amaxes, *ctx.recorded)
        grad_input = grad_weight = grad_bias = None
        grad_operand: Operand | None = None
        if weight_t is not None:
            grad_operand = cast_operand(grad_output, recipe.grad_input.a, tap)
            grad_input = _multiply(grad_operand, weight_t, recipe.grad_input, input_dtype)
        if input_t is not None:
            grad_t = _transposed(grad_operand, grad_output, recipe.grad_input.a, recipe.grad_weight.a, tap)
            grad_weight = _multiply(grad_t, input_t, recipe.grad_weight, weight_dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad_output.sum(dim=0, dtype=torch.float32).to(bias_dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, None


def _multiply(a: Operand, b: Operand, gemm: GemmSpec, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
        computed = torch.float32 if out_dtype is torch.float64 else out_dtype
        return scaled_mm(a, b, out_dtype=computed, bias=bias, fast_accumulation=gemm.fast_accumulation).to(out_dtype)
    assert isinstance(a, Tensor), "a GemmSpec casts both operands or neither"
    assert isinstance(b, Tensor), "a GemmSpec casts both operands or neither"
    return high_precision_mm(a, b, bias).to(out_dtype)


def _transposed(
    operand: Operand | None, hp: Tensor, made_by: CastSpec | None, wanted: CastSpec | None, tap: RoleTap
) -> Operand:
    """The transpose of ``hp`` cast as ``wanted``; ``operand``'s codes where its cast gives the same ones."""
    if isinstance(operand, QuantizedTensor) and made_by == wanted and operand.granularity.orientation_free:
        return operand.t()
    return cast_operand(hp.t(), wanted, tap)


def _tap(role: int, amaxes: Tensor | None, pending: Tensor | None, nonfinite: Tensor | None) -> RoleTap:
    return RoleTap(*(None if tensor is None else tensor[role] for tensor in (amaxes, pending, nonfinite)))


def _keep(ctx: Any, operands: Sequence[Operand | None], amaxes: Tensor | None) -> None:
    """Save operands for backward as plain tensors, which activation checkpointing and saved-tensor hooks see."""
    tensors: list[Tensor | None] = [amaxes]
    ctx.layouts = []
    for operand in operands:
        if isinstance(operand, QuantizedTensor):
            tensors += [operand.data, operand.scale]
            ctx.layouts.append((operand.granularity, operand.hp_dtype))
        else:
            tensors += [operand, None]
            ctx.layouts.append(None)
    ctx.save_for_backward(*tensors)


def _kept(ctx: Any) -> tuple[list[Operand | None], Tensor | None]:
    """What :func:`_keep` saved."""
    amaxes, *pairs = ctx.saved_tensors
    operands: list[Operand | None] = []
    for layout, data, scale in zip(ctx.layouts, pairs[::2], pairs[1::2], strict=True):
        if layout is None:
            operands.append(data)
        else:
            granularity, hp_dtype = layout
            operands.append(QuantizedTensor(data, scale, granularity, hp_dtype))
    return operands, amaxes

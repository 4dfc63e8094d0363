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
from octavo.numerics import QuantizedTensor
from octavo.numerics import amax as measure_amax
from octavo.observers import GRAD_OUTPUT
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
) -> Tensor:
    """``x @ weight.T + bias``, its GEMMs and those of its backward as ``recipe`` says.

    Args:
        x: [..., K]; float16, bfloat16 or float32 (float64 is computed in float32).
        weight: [N, K], any of these dtypes: a float32 master weight is quantized from its float32 values.
        bias: [N] or None; added in FP32 before the output is rounded.
        recipe: the casts and GEMMs.
        amaxes: [3] float32, for input, weight and grad_output, what delayed scales are made from; where it is 0, or
            without it, a delayed cast measures its own tensor.
        pending: [3] float32; backward raises ``pending[GRAD_OUTPUT]`` to grad_output's amax.

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
    y: Tensor = _ScaledLinear.apply(computed, weight, bias, recipe, amaxes, pending)  # type: ignore[no-untyped-call]
    return y.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def cast_operand(x: Tensor, spec: CastSpec | None, amax: Tensor | None = None) -> Operand:
    """``x`` as one operand of a GEMM.

    Args:
        x: a matrix whose last dimension the GEMM sums over.
        spec: how to cast; None leaves ``x`` as it is.
        amax: for a delayed cast, what its scale is made from; where it is 0 or None, ``x`` is measured.
    """
    if spec is None:
        return x
    if spec.scaling == Scaling.DYNAMIC:
        amax = None
    elif amax is not None:
        amax = torch.where(amax > 0, amax, measure_amax(x))
    return quantize(
        x,
        spec.format,
        granularity=spec.granularity,
        amax=amax,
        power_of_two=spec.power_of_two,
        amax_floor=spec.amax_floor,
        margin=spec.margin,
        nonfinite=spec.nonfinite,
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
    ) -> Tensor:
        input_amax, weight_amax, grad_amax = (None, None, None) if amaxes is None else amaxes.unbind()
        input_operand = cast_operand(x, recipe.output.a, input_amax)
        weight_operand = cast_operand(weight, recipe.output.b, weight_amax)
        needs_grad_input, needs_grad_weight, *_ = ctx.needs_input_grad
        kept: list[Operand | None] = [None, None]
        if needs_grad_input:
            kept[0] = _transposed(weight_operand, weight, recipe.output.b, recipe.grad_input.b, weight_amax)
        if needs_grad_weight:
            kept[1] = _transposed(input_operand, x, recipe.output.a, recipe.grad_weight.b, input_amax)
        _keep(ctx, kept, grad_amax)
        ctx.recipe, ctx.pending = recipe, pending
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return _multiply(input_operand, weight_operand, recipe.output, x.dtype, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        recipe: Recipe = ctx.recipe
        input_dtype, weight_dtype, bias_dtype = ctx.dtypes
        (weight_t, input_t), grad_amax = _kept(ctx)
        if ctx.pending is not None and grad_output.numel():
            running = ctx.pending[GRAD_OUTPUT]
            running.copy_(torch.maximum(running, measure_amax(grad_output)))
        grad_input = grad_weight = grad_bias = None
        grad_operand: Operand | None = None
        if weight_t is not None:
            grad_operand = cast_operand(grad_output, recipe.grad_input.a, grad_amax)
            grad_input = _multiply(grad_operand, weight_t, recipe.grad_input, input_dtype)
        if input_t is not None:
            grad_t = _transposed(grad_operand, grad_output, recipe.grad_input.a, recipe.grad_weight.a, grad_amax)
            grad_weight = _multiply(grad_t, input_t, recipe.grad_weight, weight_dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad_output.sum(dim=0, dtype=torch.float32).to(bias_dtype)
        return grad_input, grad_weight, grad_bias, None, None, None


def _multiply(a: Operand, b: Operand, gemm: GemmSpec, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
        computed = torch.float32 if out_dtype is torch.float64 else out_dtype
        return scaled_mm(a, b, out_dtype=computed, bias=bias, fast_accumulation=gemm.fast_accumulation).to(out_dtype)
    assert isinstance(a, Tensor), "a GemmSpec casts both operands or neither"
    assert isinstance(b, Tensor), "a GemmSpec casts both operands or neither"
    return high_precision_mm(a, b, bias).to(out_dtype)


def _transposed(
    operand: Operand | None, hp: Tensor, made_by: CastSpec | None, wanted: CastSpec | None, amax: Tensor | None
) -> Operand:
    """The transpose of ``hp`` cast as ``wanted``; ``operand``'s codes where its cast gives the same ones."""
    if isinstance(operand, QuantizedTensor) and made_by == wanted and operand.granularity.orientation_free:
        return operand.t()
    return cast_operand(hp.t(), wanted, amax)


def _keep(ctx: Any, operands: Sequence[Operand | None], grad_amax: Tensor | None) -> None:
    """Save operands for backward as plain tensors, which activation checkpointing and saved-tensor hooks see."""
    tensors: list[Tensor | None] = [grad_amax]
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
    grad_amax, *pairs = ctx.saved_tensors
    operands: list[Operand | None] = []
    for layout, data, scale in zip(ctx.layouts, pairs[::2], pairs[1::2], strict=True):
        if layout is None:
            operands.append(data)
        else:
            granularity, hp_dtype = layout
            operands.append(QuantizedTensor(data, scale, granularity, hp_dtype))
    return operands, grad_amax

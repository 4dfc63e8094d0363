"""The linear layer in FP8: cast each operand by its role, then multiply three times.

    output      = input [M, K] @ weight.T              weight [N, K]
    grad_input  = grad_output [M, N] @ weight          the weight's transpose [K, N] is its right operand
    grad_weight = grad_output.T [N, M] @ input         the input's transpose [K, M] is its right operand

Forward casts input and weight and multiplies them. octavo/functional/saved_operands.py selects what backward keeps: not
the high-precision tensors but codes and scales, one byte an element, or the tensors to recompute these from.

FP8 or high precision is decided in this order:

1. ``octavo.nn.Linear.recipe_now`` is the recipe of the call: ``octavo.autocast``'s, or else the layer's own. If all of
   it is in high precision, no operand is cast.
2. Each of the recipe's three GemmSpecs has a CastSpec for each operand, or None, which leaves that operand uncast.
3. :func:`multiply` multiplies two QuantizedTensors in FP8, and anything else in high precision.

Only then octavo/kernels/dispatch.py chooses which backend computes an FP8 product; it never leaves FP8.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo.errors import ConfigError
from octavo.functional.saved_operands import (
    InputOperands,
    RecomputedOperand,
    SavedOperand,
    WeightOperands,
    cast_grad_output,
    cast_input,
    load_operands,
    operand_of,
    recasts_weight,
    save_operands,
    serves_both_ways,
)
from octavo.kernels import high_precision_mm, scaled_mm
from octavo.kernels.backend import refuse_transforms
from octavo.kernels.tracing import unaliased
from octavo.numerics import Accumulate, QuantizedTensor
from octavo.recipes import GemmSpec, Recipe
from octavo.scaling import GRAD_OUTPUT, INPUT, WEIGHT, LayerScaling, Operand, inside_backward

__all__ = ["fp8_linear", "multiply"]


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    *,
    weight_operands: "WeightOperands | None" = None,
    input_operands: InputOperands | None = None,
    scaling: LayerScaling | None = None,
) -> Tensor:
    """Compute ``x @ weight.T + bias``, with the casts and GEMMs of ``recipe`` in forward and backward.

    Args:
        x: [..., K]; float16, bfloat16 or float32 (float64 is computed in float32).
        weight: [N, K], any of these dtypes: a float32 master weight is quantized from its float32 values.
        bias: [N] or None; added in FP32 before the output is rounded.
        recipe: the casts and GEMMs.
        weight_operands: the weight's operands if it is cast already; ``weight`` then only receives the gradient.
        input_operands: the input's operands if it is cast already; ``x`` then only gives shape and dtype and receives
            the gradient, so it may be an expanded scalar (``value.expand(M, K)``). It is not measured.
        scaling: amaxes and scale of delayed and static casts, and where to record; without it a delayed cast measures
            its own tensor. A weight that takes no gradient records no amax.

    Returns:
        [..., N] in ``x``'s dtype. Gradients have the dtypes of their tensors. A NaN or ±Inf in ``x`` shows in its own
        rows.

    Raises:
        BackendError: a transform of ``torch.func`` is running.
        ConfigError: the recipe's input is static and ``scaling`` has no scale for it, or the recipe cannot
            use these ``input_operands``.

    Example:
        >>> from octavo import recipes
        >>> x, weight = torch.ones(2, 4), torch.ones(3, 4, requires_grad=True)
        >>> y = fp8_linear(x, weight, None, recipes.get("tensorwise"))
        >>> y.sum().backward()
        >>> torch.allclose(y, torch.full((2, 3), 4.0)), torch.allclose(weight.grad, torch.full((3, 4), 2.0))
        (True, True)
    """
    rows = x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # -1 would not do for K = 0
    computed = rows.float() if x.dtype is torch.float64 else rows
    if input_operands is not None:
        learning = weight.requires_grad and torch.is_grad_enabled()
        _check_operands(input_operands, rows, recipe, learning=learning)
    refuse_transforms("FP8 linear layers")
    y: Tensor = _ScaledLinear.apply(  # type: ignore[no-untyped-call]
        computed,
        weight,
        bias,
        recipe,
        weight_operands,
        input_operands,
        scaling or LayerScaling(),
        torch.is_grad_enabled(),
    )
    y = y if y.dtype is x.dtype else y.to(x.dtype)
    return y if x.ndim == 2 else y.reshape(*x.shape[:-1], y.shape[-1])


def _check_operands(operands: InputOperands, x: Tensor, recipe: Recipe, *, learning: bool) -> None:
    """Raise ConfigError unless the recipe's GEMMs can use these operands of ``x``."""
    output, transposed = operands.output, operands.transposed
    output_spec, transposed_spec = recipe.output.a, recipe.grad_weight.b
    pairs = [("output", output, x.shape, output_spec)]
    if isinstance(transposed, Operand):
        pairs.append(("transposed", transposed, x.t().shape, transposed_spec))
    elif transposed is None and learning and not serves_both_ways(output, output_spec, transposed_spec):
        raise ConfigError(
            f"recipe {recipe.name!r} casts the input anew for grad_weight; give input_operands.transposed"
        )
    for name, operand, shape, spec in pairs:
        if operand.shape != shape or isinstance(operand, QuantizedTensor) != (spec is not None):
            raise ConfigError(
                f"input_operands.{name} is a {type(operand).__name__} of shape {tuple(operand.shape)}; "
                f"recipe {recipe.name!r} multiplies {'a' if spec else 'no'} QuantizedTensor, of shape {tuple(shape)}"
            )


class _ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 (autograd.Function takes no keywords)
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        recipe: Recipe,
        weight_operands: WeightOperands | None,
        input_operands: InputOperands | None,
        scaling: LayerScaling,
        learning: bool,  # ctx.needs_input_grad ignores torch.no_grad()
    ) -> Tensor:
        needs_grad_input = learning and ctx.needs_input_grad[0]
        needs_grad_weight = learning and ctx.needs_input_grad[1]
        input_scaling, weight_scaling = scaling.of(INPUT), scaling.of(WEIGHT)
        if not ctx.needs_input_grad[1]:
            weight_scaling.pending = None
        if inside_backward():  # activation checkpointing repeats the call, whose elements are counted already
            input_scaling.nonfinite = weight_scaling.nonfinite = None
        watched = scaling.watch is not None
        inputs = input_operands or cast_input(x, recipe, input_scaling, learning=needs_grad_weight, watched=watched)
        weights = weight_operands
        if weights is None:
            # A non-leaf weight would be kept in memory for this alone; a watch inspects the operands of backward now.
            recast = needs_grad_input and (weight.is_leaf or scaling.weight_is_parameter) and not watched
            if recast:
                recast = recasts_weight(weight, x, recipe, inputs.for_grad_weight() if needs_grad_weight else None)
            weights = WeightOperands(weight, recipe, weight_scaling, recast=recast)
        emulate = recipe.emulate_tensor_cores
        right = weights.output(with_grad_input=needs_grad_input)  # [N, K]
        y = multiply(inputs.output, right, recipe.output, x.dtype, emulate=emulate, bias=bias)
        saved: list[SavedOperand | None] = [None, None]
        if needs_grad_input:
            saved[0], ctx.transpose_weight = weights.for_grad_input()
        if needs_grad_weight:
            saved[1] = inputs.for_grad_weight()
        if scaling.watch is not None:
            scaling.watch.forward(recipe, x, weight, (inputs.output, right), (_watched(saved[0]), _watched(saved[1])))
        save_operands(ctx, saved, scaling.amaxes)
        ctx.recipe, ctx.scaling = recipe, scaling.with_amaxes(None)
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return unaliased(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        recipe: Recipe = ctx.recipe
        input_dtype, weight_dtype, bias_dtype = ctx.dtypes
        (weight_t, input_t), amaxes = load_operands(ctx)
        scaling = ctx.scaling.with_amaxes(amaxes).of(GRAD_OUTPUT)
        emulate = recipe.emulate_tensor_cores
        grad_input = grad_weight = grad_bias = to_input = to_weight = None
        left, left_t = cast_grad_output(
            grad_output, recipe, scaling, for_input=weight_t is not None, for_weight=input_t is not None
        )
        if weight_t is not None:
            right = operand_of(weight_t)
            to_input = left, right.t() if ctx.transpose_weight else right  # [M, N], [K, N]
            grad_input = multiply(*to_input, recipe.grad_input, input_dtype, emulate=emulate)
            del right
        del left
        if ctx.scaling.watch is None:
            to_input = None  # frees its codes before grad_weight is computed
        if input_t is not None:
            to_weight = left_t, operand_of(input_t)  # [N, M], [K, M]
            grad_weight = multiply(*to_weight, recipe.grad_weight, weight_dtype, emulate=emulate)
        if ctx.scaling.watch is not None:
            ctx.scaling.watch.backward(recipe, grad_output, to_input, to_weight)
        if ctx.needs_input_grad[2]:
            grad_bias = grad_output.sum(dim=0, dtype=torch.float32).to(bias_dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, None, None


def _watched(saved: SavedOperand | None) -> Operand | None:
    assert not isinstance(saved, RecomputedOperand), "a watched layer recomputes no operand"
    return saved


def multiply(
    a: Operand, b: Operand, gemm: GemmSpec, out_dtype: torch.dtype, *, emulate: bool, bias: Tensor | None = None
) -> Tensor:
    """Multiply ``a @ b.T + bias``: in FP8 if both operands are codes, otherwise in ``a``'s dtype, in high precision."""
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
        computed = torch.float32 if out_dtype is torch.float64 else out_dtype
        accumulate = gemm.accumulate if emulate else Accumulate.FP32
        fast = gemm.accumulate is Accumulate.HOPPER_FAST
        product = scaled_mm(
            a, b, out_dtype=computed, bias=bias, accumulate=accumulate, fast_accumulation=fast and not emulate
        )
        return product if product.dtype is out_dtype else product.to(out_dtype)
    assert isinstance(a, Tensor), "a GemmSpec casts both operands, neither, or b alone"
    return high_precision_mm(a, _high_precision(b, a.dtype), bias).to(out_dtype)


def _high_precision(operand: Operand, dtype: torch.dtype) -> Tensor:
    """``operand`` in ``dtype``; codes are decoded to it with one rounding."""
    if isinstance(operand, QuantizedTensor):
        return QuantizedTensor(operand.data, operand.scale, operand.granularity, dtype).dequantize()
    return operand.to(dtype)

"""Linear function with an FP8 forward pass and a straight-through backward pass, for quantization-aware training.

    y     = x_q · W_qᵀ + bias       bitwise identical to a converted layer
    ∂x    = g · W_q                 g is ∂loss/∂y, in its dtype
    ∂W    = gᵀ · x_q

x_q and W_q are the decoded operands of the recipe's output GEMM. The derivative of rounding is zero almost everywhere;
the straight-through estimator replaces it by one (Bengio et al., arXiv 1308.3432), so that a weight receives the
gradient of its rounded value. A saturated value does not change with x: with ``clip_gradients`` its gradient is zero.
A value that rounds to the largest code is not saturated (``octavo.numerics.metrics``).

**Learned scale.** With v = x / s, the operand is x_q = s · q(v). Under the straight-through estimator q′(v) is 1, and 0
where v is clipped, so

    ∂x_q/∂s = q(v) + s · q′(v) · (−x / s²) = q(v) − v · [v is not clipped]

which is LSQ's gradient (Esser et al., arXiv 1902.08153, equation 3) for any q; unlike an integer's, FP8's rounding
error q(v) − v grows with v. The layer learns log2 s: s stays positive, and an optimizer step changes it by a factor.
With ds/dlog2 s = s · ln 2,

    ∂loss/∂log2 s = ln 2 / sqrt(K · maximum) · Σ ∂loss/∂x_q · (x_q − x · [x is not clipped])

The first factor includes LSQ's normalisation (its section 2.2), with K features per row and the format's maximum as the
number of levels. It keeps the scale's gradient comparable to the weights' when both are clipped to one norm.

Operands are saved for backward as codes, one byte per element of x and of W. With ``clip_gradients`` a mask takes
another byte if the cast can saturate, and a learned scale saves x itself.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo.functional import WeightOperands, cast_operand, multiply
from octavo.functional.saved_operands import load_operands, operand_of, save_operands
from octavo.kernels import high_precision_mm
from octavo.kernels.backend import refuse_transforms
from octavo.kernels.tracing import unaliased
from octavo.numerics import QuantizedTensor, ScaleRounding
from octavo.numerics.metrics import saturation_limit
from octavo.recipes import CastSpec, Recipe, Scaling
from octavo.scaling import INPUT, WEIGHT, LayerScaling, Operand, inside_backward

__all__ = ["straight_through_linear"]

NEVER_SATURATE = (ScaleRounding.FP32, ScaleRounding.RCEIL)  # with dynamic scales


def straight_through_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    *,
    weight_operands: WeightOperands | None = None,
    scaling: LayerScaling | None = None,
    clip_gradients: bool = False,
    log2_scale: Tensor | None = None,
) -> Tensor:
    """Compute :func:`octavo.functional.fp8_linear` with straight-through gradients.

    Args:
        x: [..., K], as for ``fp8_linear``.
        weight: [N, K], as for ``fp8_linear``.
        bias: [N] or None, as for ``fp8_linear``.
        recipe: only its output GEMM is used.
        weight_operands: as for ``fp8_linear``.
        scaling: as for ``fp8_linear``.
        clip_gradients: zero the gradient of saturated elements of ``x`` and ``weight``.
        log2_scale: [], receives the gradient of the input's scale, whose value is in ``scaling``; None if not learned.

    Returns:
        [..., N] in ``x``'s dtype.

    Example:
        >>> from octavo import recipes
        >>> weight = torch.tensor([[1.75, 0.3]], requires_grad=True)  # 0.3 becomes 0.3125
        >>> x = torch.tensor([[1.75, 0.875]], requires_grad=True)
        >>> y = straight_through_linear(x, weight, None, recipes.get("tensorwise"))
        >>> y.backward(torch.ones(1, 1))
        >>> y.item(), x.grad.tolist(), weight.grad.tolist()
        (3.3359375, [[1.75, 0.3125]], [[1.75, 0.875]])
    """
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    computed = rows.float() if x.dtype is torch.float64 else rows
    refuse_transforms("layers in quantization-aware training")
    y: Tensor = _StraightThrough.apply(  # type: ignore[no-untyped-call]
        computed,
        weight,
        bias,
        log2_scale,
        recipe,
        weight_operands,
        scaling or LayerScaling(),
        clip_gradients,
        torch.is_grad_enabled(),
    )
    return y.to(x.dtype).reshape(*x.shape[:-1], y.shape[-1])


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 (autograd.Function takes no keywords)
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        log2_scale: Tensor | None,
        recipe: Recipe,
        weight_operands: WeightOperands | None,
        scaling: LayerScaling,
        clip_gradients: bool,
        learning: bool,  # ctx.needs_input_grad does not reflect torch.no_grad()
    ) -> Tensor:
        for_input, for_weight, _, for_scale = (needed and learning for needed in ctx.needs_input_grad[:4])
        input_scaling, weight_scaling = scaling.of(INPUT), scaling.of(WEIGHT)
        if inside_backward():  # recomputed by activation checkpointing: already counted
            input_scaling.nonfinite = weight_scaling.nonfinite = None
        output = recipe.output
        weights = WeightOperands(weight, recipe, weight_scaling) if weight_operands is None else weight_operands
        input_operand, weight_operand = cast_operand(x, output.a, input_scaling), weights.output()
        y = multiply(input_operand, weight_operand, output, x.dtype, emulate=recipe.emulate_tensor_cores, bias=bias)
        saved: list[Operand | None] = [
            weight_operand if for_input or for_scale else None,
            input_operand if for_weight or for_scale else None,
            x if for_scale else None,
            _clipped(x, input_operand, output.a) if clip_gradients and for_input else None,
            _clipped(weight, weight_operand, output.b) if clip_gradients and for_weight else None,
        ]
        save_operands(ctx, saved, None)
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.needed_gradients = (for_input, for_weight, for_scale)
        return unaliased(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        saved, _ = load_operands(ctx)
        weight_operand, input_operand, x, x_clipped, weight_clipped = (
            None if each is None else operand_of(each) for each in saved
        )
        input_dtype, weight_dtype, bias_dtype = ctx.dtypes
        for_input, for_weight, for_scale = ctx.needed_gradients
        grad_x = grad_weight = grad_bias = grad_scale = None
        if for_input or for_scale:
            grad_x = high_precision_mm(g, _decoded(weight_operand).to(g.dtype).t())
        if for_scale:
            assert grad_x is not None
            grad_scale = _scale_gradient(grad_x, x, input_operand)
        if for_weight:
            grad_weight = high_precision_mm(g.t(), _decoded(input_operand).to(g.dtype).t())
        if ctx.needs_input_grad[2]:
            grad_bias = g.sum(dim=0, dtype=torch.float32).to(bias_dtype)
        grad_x = _masked(grad_x, x_clipped, input_dtype) if for_input else None
        return grad_x, _masked(grad_weight, weight_clipped, weight_dtype), grad_bias, grad_scale, *(None,) * 5


def _decoded(operand: Operand | None) -> Tensor:
    assert operand is not None
    return operand.dequantize() if isinstance(operand, QuantizedTensor) else operand


def _clipped(x: Tensor, operand: Operand, spec: CastSpec | None) -> Tensor | None:
    """Mask of saturated elements; None if the cast cannot saturate."""
    if spec is None or (spec.scaling == Scaling.DYNAMIC and spec.scale_rounding in NEVER_SATURATE):
        return None
    assert isinstance(operand, QuantizedTensor)
    return x.double().abs() > saturation_limit(operand)


def _masked(gradient: Tensor | None, clipped: Operand | None, dtype: torch.dtype) -> Tensor | None:
    if gradient is None:
        return None
    assert clipped is None or isinstance(clipped, Tensor)
    return (gradient if clipped is None else gradient.masked_fill(clipped, 0)).to(dtype)


def _scale_gradient(grad_x: Tensor, x: Operand | None, operand: Operand | None) -> Tensor:
    """Gradient of log2 s; see the module's derivation."""
    assert isinstance(x, Tensor)
    assert isinstance(operand, QuantizedTensor)
    decoded = operand.data.float() * operand.fp32_scale
    error = decoded - x.float().masked_fill(x.double().abs() > saturation_limit(operand), 0)
    normalised = math.log(2) / math.sqrt(x.shape[1] * operand.format.max)
    return (grad_x.double() * error).sum().mul(normalised).float()

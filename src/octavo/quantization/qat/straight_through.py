"""One linear layer whose forward is FP8 and whose backward is not: what quantisation-aware training differentiates.

    y     = x_q · W_qᵀ + bias       codes times codes: to the bit what a converted layer computes
    ∂x    = g · W_q                 g is ∂loss/∂y, in its own precision
    ∂W    = gᵀ · x_q

x_q and W_q are the decoded operands of the recipe's output GEMM. Rounding is a staircase, whose derivative is zero
wherever it has one; *straight through* takes it as one (Bengio et al., arXiv 1308.3432), so that a weight feels where
its rounded value should go. A value that saturates does stay where it is when x moves: ``clip_gradients`` gives it the
gradient zero. What merely rounds to the largest value is not clipped (``octavo.numerics.metrics``).

**A learned scale.** With v = x / s, the operand is x_q = s · q(v). Straight through, q′(v) is 1, and 0 where v is
clipped, so

    ∂x_q/∂s = q(v) + s · q′(v) · (−x / s²) = q(v) − v · [v is not clipped]

which is LSQ's gradient (Esser et al., arXiv 1902.08153, equation 3) for any q; on FP8's grid the rounding error
q(v) − v grows with v, where an integer's does not. The layer learns log2 s: s stays positive, and a step of the
optimizer multiplies it, whatever its size. By ds/dlog2 s = s · ln 2,

    ∂loss/∂log2 s = ln 2 / sqrt(K · maximum) · Σ ∂loss/∂x_q · (x_q − x · [x is not clipped])

The first factor holds LSQ's normalisation (its section 2.2): K features of a row, and the format's maximum for the
number of levels. It puts the scale's gradient beside the weights' where they are clipped together.

What backward needs is kept as codes, one byte an element of x and of W. A clipped mask costs another byte where
``clip_gradients`` is on and the cast can saturate at all, and a learned scale keeps x itself.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo.functional import WeightOperands, cast_operand, multiply
from octavo.functional.saved_operands import load_operands, operand_of, save_operands
from octavo.kernels import high_precision_mm
from octavo.kernels.tracing import unaliased
from octavo.numerics import QuantizedTensor, ScaleRounding
from octavo.numerics.metrics import saturation_limit
from octavo.recipes import CastSpec, Recipe, Scaling
from octavo.scaling import INPUT, WEIGHT, LayerScaling, Operand, inside_backward

__all__ = ["straight_through_linear"]

NEVER_SATURATE = (ScaleRounding.FP32, ScaleRounding.RCEIL)  # as rules for a dynamic scale


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
    """``x @ weight.T + bias`` as :func:`octavo.functional.fp8_linear` computes it, differentiated straight through.

    Args:
        x: [..., K]; as there.
        weight: [N, K]; as there.
        bias: [N] or None; as there.
        recipe: only its output GEMM counts.
        weight_operands: as there.
        scaling: as there.
        clip_gradients: whether an element of ``x`` or ``weight`` that saturates takes the gradient zero.
        log2_scale: [], takes the gradient of the input's scale, which ``scaling`` holds; None where it is not learned.

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
        learning: bool,  # ctx.needs_input_grad says nothing of torch.no_grad()
    ) -> Tensor:
        for_input, for_weight, _, for_scale = (needed and learning for needed in ctx.needs_input_grad[:4])
        input_scaling, weight_scaling = scaling.of(INPUT), scaling.of(WEIGHT)
        if inside_backward():  # activation checkpointing computes the call again: what it saw is counted already
            input_scaling.nonfinite = weight_scaling.nonfinite = None
        output = recipe.output
        weights = WeightOperands(weight, recipe, weight_scaling) if weight_operands is None else weight_operands
        left, right = cast_operand(x, output.a, input_scaling), weights.output()
        y = multiply(left, right, output, x.dtype, emulate=recipe.emulate_tensor_cores, bias=bias)
        kept: list[Operand | None] = [
            right if for_input or for_scale else None,
            left if for_weight or for_scale else None,
            x if for_scale else None,
            _clipped(x, left, output.a) if clip_gradients and for_input else None,
            _clipped(weight, right, output.b) if clip_gradients and for_weight else None,
        ]
        save_operands(ctx, kept, None)
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.wanted = (for_input, for_weight, for_scale)
        return unaliased(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        kept, _ = load_operands(ctx)
        right, left, x, x_clipped, weight_clipped = (None if each is None else operand_of(each) for each in kept)
        input_dtype, weight_dtype, bias_dtype = ctx.dtypes
        for_input, for_weight, for_scale = ctx.wanted
        grad_x = grad_weight = grad_bias = grad_scale = None
        if for_input or for_scale:
            grad_x = high_precision_mm(g, _decoded(right).to(g.dtype).t())
        if for_scale:
            assert grad_x is not None
            grad_scale = _scale_gradient(grad_x, x, left)
        if for_weight:
            grad_weight = high_precision_mm(g.t(), _decoded(left).to(g.dtype).t())
        if ctx.needs_input_grad[2]:
            grad_bias = g.sum(dim=0, dtype=torch.float32).to(bias_dtype)
        grad_x = _masked(grad_x, x_clipped, input_dtype) if for_input else None
        return grad_x, _masked(grad_weight, weight_clipped, weight_dtype), grad_bias, grad_scale, *(None,) * 5


def _decoded(operand: Operand | None) -> Tensor:
    assert operand is not None
    return operand.dequantize() if isinstance(operand, QuantizedTensor) else operand


def _clipped(x: Tensor, operand: Operand, spec: CastSpec | None) -> Tensor | None:
    """Which elements saturate; None where none can."""
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
    """The gradient of log2 s; the module's text derives it."""
    assert isinstance(x, Tensor)
    assert isinstance(operand, QuantizedTensor)
    decoded = operand.data.float() * operand.fp32_scale
    error = decoded - x.float().masked_fill(x.double().abs() > saturation_limit(operand), 0)
    normalised = math.log(2) / math.sqrt(x.shape[1] * operand.format.max)
    return (grad_x.double() * error).sum().mul(normalised).float()

"""The linear layer in FP8: cast each operand by its role, then multiply three times.

Forward casts input and weight and multiplies them. What backward needs is decided there too: not the high-precision
tensors but codes and scales, one byte an element. Where a recipe casts a tensor the same way for both of its GEMMs,
and its scaling groups do not depend on the orientation, one cast serves both: three quantizations a step for a
tensorwise recipe, not six.

A parameter is there in any case, and under FSDP2 its memory is given back between forward and backward. So backward
casts a weight again where that costs no more than keeping its codes, since the transpose takes a cast of its own (on a
GPU, whose GEMM reads both operands along the dimension that it sums over, for every recipe), and where the codes would
make the layer keep more than it does in bfloat16.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo.errors import ConfigError
from octavo.functional.saved_operands import RecomputedOperand, SavedOperand, load_operands, operand_of, save_operands
from octavo.kernels import ScaleRule, high_precision_mm, quantize_and_measure, quantize_both_ways, scaled_mm
from octavo.kernels.tracing import is_recorded, unaliased
from octavo.numerics import Accumulate, PerTensor, QuantizedTensor, Record
from octavo.numerics.cast import is_eager_cpu
from octavo.recipes import CastSpec, GemmSpec, Recipe, Scaling
from octavo.scaling import GRAD_OUTPUT, INPUT, WEIGHT, LayerScaling, Operand, OperandScaling, inside_backward
from octavo.scaling.scale_updates import OptimizerSteps

__all__ = [
    "InputOperands",
    "WeightCache",
    "WeightOperands",
    "cast_input",
    "cast_operand",
    "fp8_linear",
    "multiply",
]


@dataclass(frozen=True, slots=True)
class InputOperands:
    """An input as a recipe's operands, made by whoever made the input.

    Attributes:
        output: [M, K], the left operand of the output GEMM.
        transposed: [K, M], the right operand of grad_weight's GEMM; None where ``output``'s own transpose serves, or
            where the weight takes no gradient.
    """

    output: Operand
    transposed: SavedOperand | None = None


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    *,
    weight_operands: "WeightOperands | None" = None,
    input_operands: InputOperands | None = None,
    tap: LayerScaling | None = None,
) -> Tensor:
    """``x @ weight.T + bias``, its GEMMs and those of its backward as ``recipe`` says.

    Args:
        x: [..., K]; float16, bfloat16 or float32 (float64 is computed in float32).
        weight: [N, K], any of these dtypes: a float32 master weight is quantized from its float32 values.
        bias: [N] or None; added in FP32 before the output is rounded.
        recipe: the casts and GEMMs.
        weight_operands: the weight's operands where they exist already; ``weight`` then only takes the gradient.
        input_operands: the input's operands where they exist already; ``x`` then only says shape and dtype and takes
            the gradient, so that it needs no memory of its own (``value.expand(M, K)``). Nothing of it is measured.
        tap: what delayed and static scales are made from, and what is recorded; without it a delayed cast measures its
            own tensor. A weight that takes no gradient records no amax.

    Returns:
        [..., N] in ``x``'s dtype. Gradients have the dtypes of their tensors. A NaN or ±Inf in ``x`` shows in its own
        rows.

    Raises:
        ConfigError: the recipe's input is static and ``tap`` has no scale for it, or ``input_operands`` are not what
            the recipe multiplies.

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
    y: Tensor = _ScaledLinear.apply(  # type: ignore[no-untyped-call]
        computed, weight, bias, recipe, weight_operands, input_operands, tap or LayerScaling(), torch.is_grad_enabled()
    )
    y = y if y.dtype is x.dtype else y.to(x.dtype)
    return y if x.ndim == 2 else y.reshape(*x.shape[:-1], y.shape[-1])


def _check_operands(operands: InputOperands, x: Tensor, recipe: Recipe, *, learning: bool) -> None:
    """Raise ConfigError unless the recipe's GEMMs can use these operands of ``x``."""
    made, transposed = operands.output, operands.transposed
    made_by, wanted = recipe.output.a, recipe.grad_weight.b
    pairs = [("output", made, x.shape, made_by)]
    if isinstance(transposed, Operand):
        pairs.append(("transposed", transposed, x.t().shape, wanted))
    elif transposed is None and learning and not _serves_both_ways(made, made_by, wanted):
        raise ConfigError(
            f"recipe {recipe.name!r} casts the input anew for grad_weight; give input_operands.transposed"
        )
    for name, operand, shape, spec in pairs:
        if operand.shape != shape or isinstance(operand, QuantizedTensor) != (spec is not None):
            raise ConfigError(
                f"input_operands.{name} is a {type(operand).__name__} of shape {tuple(operand.shape)}; "
                f"recipe {recipe.name!r} multiplies {'a' if spec else 'no'} QuantizedTensor, of shape {tuple(shape)}"
            )


def cast_operand(x: Tensor, spec: CastSpec | None, tap: OperandScaling | None = None) -> Operand:
    """``x`` as one operand of a GEMM.

    Args:
        x: a matrix whose last dimension the GEMM sums over.
        spec: how to cast; None leaves ``x`` as it is.
        tap: records what is measured, and gives a delayed cast what its scale is made from; where that is 0 or there
            is no tap, ``x``'s own amax is used. A static cast takes its scale from it.
    """
    if spec is None:
        return x
    tap = OperandScaling() if tap is None else tap
    return quantize_and_measure(x, **_options(spec, tap), into=tap.take())[0]


def cast_input(
    x: Tensor, recipe: Recipe, tap: OperandScaling, *, learning: bool, watched: bool = False
) -> InputOperands:
    """An input's operands.

    Args:
        x: [M, K], not float64.
        recipe: the casts.
        tap: as for :func:`cast_operand`.
        learning: whether the weight takes a gradient.
        watched: cast for grad_weight now in any case.
    """
    made_by, wanted = recipe.output.a, recipe.grad_weight.b
    if not learning:
        return InputOperands(cast_operand(x, made_by, tap))
    if wanted is not None and not watched and _codes_are_larger(x, wanted):
        return InputOperands(cast_operand(x, made_by, tap), RecomputedOperand(RecomputeTranspose(wanted), (x, None)))
    return InputOperands(*_cast_both_ways(x, made_by, wanted, tap))


def _cast_both_ways(
    x: Tensor, spec: CastSpec | None, wanted: CastSpec | None, tap: OperandScaling
) -> tuple[Operand, Operand]:
    """``x`` cast as ``spec``, and its transpose cast as ``wanted``, together where both are the same."""
    if spec is not None and spec == wanted:  # "!=" is more than a tracer can compare
        quantized, transposed, _ = quantize_both_ways(x, **_options(spec, tap), into=tap.take())
        return quantized, transposed
    return cast_operand(x, spec, tap), cast_operand(x.t(), wanted, tap)


def _options(spec: CastSpec, tap: OperandScaling) -> dict[str, Any]:
    """A cast's arguments, from what the recipe says and what the layer remembers."""
    if spec.scaling == Scaling.STATIC and tap.scale is None:
        raise ConfigError("a static cast has no scale; calibrate the model, or load its scaling state")
    return {
        "fmt": spec.format,
        "granularity": spec.granularity,
        "rule": ScaleRule(spec.scale_rounding, spec.amax_floor, spec.margin),
        "scale_format": spec.scale_format,
        "nonfinite": spec.nonfinite,
        "rounding": spec.rounding,
        "amax": tap.amax if spec.scaling == Scaling.DELAYED else None,
        "scale": tap.scale if spec.scaling == Scaling.STATIC else None,
        "zero_is_unknown": True,
    }


@dataclass(frozen=True, slots=True)
class RecomputeTranspose:
    """Casts the transpose of a matrix that was cast, and measured, before."""

    spec: CastSpec

    def make(self, *tensors: Tensor | None) -> Operand:
        """The operand, of the matrix and of the amax that its scale is made from; None measures the matrix again."""
        matrix, amax = tensors
        assert matrix is not None
        options = _options(self.spec, OperandScaling()) | {"amax": amax}
        return quantize_and_measure(matrix.t(), **options, into=Record())[0]


def _cast_weight(
    weight: Tensor, spec: CastSpec, wanted: CastSpec, tap: OperandScaling
) -> tuple[Operand, RecomputedOperand]:
    """The right operand of the output GEMM, cast as ``spec``, and grad_input's, to be cast as ``wanted``.

    One scale for all of an unchanged weight is made of one amax, so that it is not measured twice: a delayed scale's is
    given, a dynamic scale's is recorded, unless the layer's history takes the record.
    """
    amax = tap.amax if wanted.scaling == Scaling.DELAYED else None
    dynamic = wanted == spec and wanted.scaling == Scaling.DYNAMIC and isinstance(wanted.granularity, PerTensor)
    if dynamic and tap.pending is None:
        amax = tap.pending = torch.zeros((), dtype=torch.float32, device=weight.device)
    return cast_operand(weight, spec, tap), RecomputedOperand(RecomputeTranspose(wanted), (weight, amax))


def casts_weight_again(weight: Tensor, x: Tensor, recipe: Recipe, kept_input: SavedOperand | None) -> bool:
    """Whether backward casts a weight again, a parameter, and forward keeps no codes of it.

    Args:
        weight: [N, K].
        x: [M, K].
        recipe: the casts.
        kept_input: what is kept for the weight's gradient; None where it takes none.
    """
    spec, wanted = recipe.output.b, recipe.grad_input.b
    if spec is None or wanted is None:
        return False
    if weight.is_cuda or not (spec == wanted and spec.granularity.orientation_free):
        return True
    in_bfloat16 = 0 if kept_input is None else _BFLOAT16_BYTES * x.numel()
    if weight.itemsize > x.itemsize:  # as under torch.autocast, which keeps its copy of the weight
        in_bfloat16 += _BFLOAT16_BYTES * weight.numel()
    return _holds(_bytes_kept(kept_input) + _bytes_of_codes(weight.shape, spec) > in_bfloat16)


_BFLOAT16_BYTES = torch.bfloat16.itemsize


def _bytes_kept(kept: SavedOperand | None) -> int:
    if isinstance(kept, QuantizedTensor):
        return _bytes_kept(kept.data) + _bytes_kept(kept.scale)
    if isinstance(kept, RecomputedOperand):
        return sum(_bytes_kept(tensor) for tensor in kept.tensors)
    return 0 if kept is None else kept.numel() * kept.itemsize  # a tensor of symbolic shape has no nbytes


def _bytes_of_codes(shape: torch.Size, spec: CastSpec) -> int:
    """Bytes of a tensor's codes and scales."""
    scales = math.prod(spec.granularity.scale_shape(shape))  # Size.numel() would make constants of symbols
    return math.prod(shape) + scales * spec.scale_format.torch_dtype.itemsize


def _holds(comparison: bool) -> bool:
    """Whether a comparison of sizes holds; of symbolic ones, whether for all of them, so that a graph gets no guard."""
    if not is_recorded():
        return comparison
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # takes a third of a second

    return statically_known_true(comparison)


class WeightOperands:
    """A weight as ``recipe``'s operands, each cast when it is first asked for and kept.

    Args:
        weight: [N, K] in high precision, or codes that are held instead of it and stay what they are.
        recipe: the casts.
        tap: for casts of a weight in high precision.
        again: keep the weight itself for grad_input, if it has a cast of its own, and cast it again in backward.
    """

    def __init__(
        self, weight: Operand, recipe: Recipe, tap: OperandScaling | None = None, *, again: bool = False
    ) -> None:
        self._weight, self._recipe, self._tap = weight, recipe, OperandScaling() if tap is None else tap
        self._again = again
        self._output: Operand | None = None
        self._grad_input: SavedOperand | None = None

    def output(self, *, and_kept: bool = False) -> Operand:
        """The right operand of the output GEMM, [N, K]; ``and_kept`` says that :meth:`kept` will be asked too."""
        if self._output is None:
            weight, spec, wanted = self._weight, self._recipe.output.b, self._recipe.grad_input.b
            if isinstance(weight, QuantizedTensor):
                self._output = weight
            elif and_kept and self._again and spec is not None and wanted is not None:
                self._output, self._grad_input = _cast_weight(weight, spec, wanted, self._tap)
            elif and_kept:
                self._output, self._grad_input = _cast_both_ways(weight, spec, wanted, self._tap)
            else:
                self._output = cast_operand(weight, spec, self._tap)
        return self._output

    def kept(self) -> tuple[SavedOperand, bool]:
        """What grad_input's GEMM needs of the weight, and whether it is still to be transposed to [K, N]."""
        output, wanted = self.output(and_kept=True), self._recipe.grad_input.b
        if self._grad_input is None:
            made_by = wanted if isinstance(self._weight, QuantizedTensor) else self._recipe.output.b
            if _serves_both_ways(output, made_by, wanted):
                return output, True
            weight = self._weight
            decoded = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
            self._grad_input = cast_operand(decoded.t(), wanted, self._tap)
        return self._grad_input, False


class WeightCache:
    """Keeps a weight's operands until the weight changes, so that micro-batches of a step cast it once.

    Autograd's version counter alone misses changes: fused optimizers do not raise it, nor does what is written through
    ``weight.data``. An eager CPU weight is therefore also recognised by the sums of its bits over every row and every
    column, a tenth of the cost of casting it; a change that leaves all of them as they were is not seen. Other devices
    would have to wait for such sums; there a step of any ``torch.optim`` optimizer counts as a change, and after other
    writes ``octavo.update_scales(model)`` empties the cache.
    """

    def __init__(self) -> None:
        self._key: tuple[object, ...] = ()
        self._content = torch.empty(0, device="cpu")
        self._operands: WeightOperands | None = None
        OptimizerSteps.watch()

    def operands(
        self, weight: Tensor, recipe: Recipe, tap: OperandScaling, *, learning: bool
    ) -> "WeightOperands | None":
        """The weight's operands under ``recipe``; None where they are neither known nor to be kept.

        What evaluation casts is not kept for a delayed recipe, since it records no amax, nor in inference mode, since
        autograd refuses its tensors later. ``tap`` records a cast.
        """
        if weight.is_inference():
            return None
        key = (weight.data_ptr(), weight._version, weight.dtype, recipe, OptimizerSteps.count)  # noqa: SLF001
        content = _sums_of_bits(weight.detach()) if is_eager_cpu(weight) else self._content
        if self._operands is not None and self._key == key and torch.equal(self._content, content):
            return self._operands
        if torch.is_inference_mode_enabled() or (recipe.is_delayed and not learning):
            return None
        self._key, self._content = key, content
        self._operands = WeightOperands(weight.detach(), recipe, tap)
        return self._operands

    def clear(self) -> None:
        """Forget the operands."""
        self._operands = None


def _sums_of_bits(weight: Tensor) -> Tensor:
    """Sums of the bits of a matrix, as integers modulo 2^64, over its columns and over its rows: int64 [K' + N]."""
    wide = 8 // weight.itemsize
    aligned = weight.is_contiguous() and weight.shape[1] % wide == 0 and weight.storage_offset() % wide == 0
    words = weight.view(torch.int64 if aligned else _BITS[weight.itemsize])
    return torch.cat([words.sum(0), words.sum(1)])


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        tap: LayerScaling,
        learning: bool,  # ctx.needs_input_grad says nothing of torch.no_grad()
    ) -> Tensor:
        needs_grad_input, needs_grad_weight = (needed and learning for needed in ctx.needs_input_grad[:2])
        input_tap, weight_tap = tap.of(INPUT), tap.of(WEIGHT)
        if not ctx.needs_input_grad[1]:
            weight_tap.pending = None
        if inside_backward():  # activation checkpointing computes the call again: what it saw is counted already
            input_tap.nonfinite = weight_tap.nonfinite = None
        watched = tap.watch is not None
        inputs = input_operands or cast_input(x, recipe, input_tap, learning=needs_grad_weight, watched=watched)
        weights = weight_operands
        if weights is None:
            # A weight that was computed would be kept for this alone; a watch sees what backward will multiply.
            again = needs_grad_input and weight.is_leaf and not watched
            if again:
                again = casts_weight_again(weight, x, recipe, _transpose_of(inputs) if needs_grad_weight else None)
            weights = WeightOperands(weight, recipe, weight_tap, again=again)
        emulate = recipe.emulate_tensor_cores
        right = weights.output(and_kept=needs_grad_input)
        y = multiply(inputs.output, right, recipe.output, x.dtype, emulate=emulate, bias=bias)
        kept: list[SavedOperand | None] = [None, None]
        if needs_grad_input:
            kept[0], ctx.transpose_weight = weights.kept()
        if needs_grad_weight:
            kept[1] = _transpose_of(inputs)
        if tap.watch is not None:
            tap.watch.forward(recipe, x, weight, (inputs.output, right), (_watched(kept[0]), _watched(kept[1])))
        save_operands(ctx, kept, tap.amaxes)
        ctx.recipe, ctx.tap = recipe, replace(tap, amaxes=None)
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return unaliased(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        recipe: Recipe = ctx.recipe
        input_dtype, weight_dtype, bias_dtype = ctx.dtypes
        (weight_t, input_t), amaxes = load_operands(ctx)
        tap = replace(ctx.tap, amaxes=amaxes).of(GRAD_OUTPUT)
        emulate = recipe.emulate_tensor_cores
        grad_input = grad_weight = grad_bias = to_input = to_weight = None
        left, left_t = _grad_operands(grad_output, recipe, tap, weight_t is not None, input_t is not None)
        if weight_t is not None:
            right = operand_of(weight_t)
            to_input = left, right.t() if ctx.transpose_weight else right
            grad_input = multiply(*to_input, recipe.grad_input, input_dtype, emulate=emulate)
            del right
        del left
        if ctx.tap.watch is None:
            to_input = None  # its codes make room for grad_weight
        if input_t is not None:
            to_weight = left_t, operand_of(input_t)
            grad_weight = multiply(*to_weight, recipe.grad_weight, weight_dtype, emulate=emulate)
        if ctx.tap.watch is not None:
            ctx.tap.watch.backward(recipe, grad_output, to_input, to_weight)
        if ctx.needs_input_grad[2]:
            grad_bias = grad_output.sum(dim=0, dtype=torch.float32).to(bias_dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, None, None


def _watched(kept: SavedOperand | None) -> Operand | None:
    assert not isinstance(kept, RecomputedOperand), "where a layer is watched, nothing is made again"
    return kept


def multiply(
    a: Operand, b: Operand, gemm: GemmSpec, out_dtype: torch.dtype, *, emulate: bool, bias: Tensor | None = None
) -> Tensor:
    """``a @ b.T + bias`` as ``gemm`` says; in high precision, in ``a``'s dtype, where ``a`` is no code."""
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
    """``operand`` in ``dtype``, to which codes are decoded by one rounding, whatever they were made of."""
    if isinstance(operand, QuantizedTensor):
        return QuantizedTensor(operand.data, operand.scale, operand.granularity, dtype).dequantize()
    return operand.to(dtype)


def _codes_are_larger(x: Tensor, wanted: CastSpec) -> bool:
    """Whether the transpose's codes and scales outweigh ``x`` itself: of few rows each column has a scale."""
    return not wanted.granularity.orientation_free and _holds(_bytes_of_codes(x.t().shape, wanted) > _bytes_kept(x))


def _transpose_of(inputs: InputOperands) -> SavedOperand:
    return inputs.output.t() if inputs.transposed is None else inputs.transposed


def _grad_operands(
    grad_output: Tensor, recipe: Recipe, tap: OperandScaling, for_input: bool, for_weight: bool
) -> tuple[Operand, Operand]:
    """The left operands of grad_input's and of grad_weight's GEMM; one that is not needed is not cast."""
    if for_input and for_weight:
        return _cast_both_ways(grad_output, recipe.grad_input.a, recipe.grad_weight.a, tap)
    if for_input:
        return cast_operand(grad_output, recipe.grad_input.a, tap), grad_output
    return grad_output, cast_operand(grad_output.t(), recipe.grad_weight.a, tap) if for_weight else grad_output


def _serves_both_ways(operand: Operand | None, made_by: CastSpec | None, wanted: CastSpec | None) -> bool:
    """Whether ``operand``'s codes, transposed, are those of the transpose cast as ``wanted``."""
    return isinstance(operand, QuantizedTensor) and made_by == wanted and operand.granularity.orientation_free

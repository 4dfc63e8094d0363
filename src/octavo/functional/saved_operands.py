"""Operands of a linear layer's GEMMs: cast by their roles, saved for backward, or recomputed there.

Where a recipe casts a tensor the same way for both of its GEMMs, and its scaling groups do not depend on the
orientation, one cast serves both: three quantizations a step for a tensorwise recipe, not six.

Codes are one byte an element. Codes of a parameter, or of a tensor that is saved anyway, need not be saved: a
:class:`RecomputedOperand` stands for an operand that backward recomputes, bit for bit, when its GEMM runs.

All is saved as plain tensors: activation checkpointing and saved-tensor hooks see them, and autograd raises where they
have changed in place. As elsewhere in torch, it does not detect writes of fused optimizers or through ``.data``: an
operand recomputed after one is the new weight's, cast with the scale of the old one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels import cast
from octavo.kernels.tracing import is_tracing
from octavo.numerics import AmaxRecord, CastSpec, PerTensor, QuantizedTensor, Scaling
from octavo.recipes import Recipe
from octavo.scaling import Operand, OperandScaling

__all__ = [
    "InputOperands",
    "Recompute",
    "RecomputedOperand",
    "SavedOperand",
    "WeightOperands",
    "cast_both_ways",
    "cast_grad_output",
    "cast_input",
    "cast_operand",
    "load_operands",
    "operand_of",
    "quantize_operand",
    "recasts_weight",
    "save_operands",
    "serves_both_ways",
]

_BFLOAT16_BYTES = torch.bfloat16.itemsize


class Recompute(Protocol):
    """Recomputation of an operand; holds no tensors, which are saved through autograd."""

    def compute(self, *tensors: Tensor | None) -> Operand:
        """Return the operand, with the same bits each time."""
        ...


@dataclass(frozen=True, slots=True)
class RecomputedOperand:
    """An operand that backward recomputes.

    Attributes:
        recompute: computes it from ``tensors``.
        tensors: its arguments.
    """

    recompute: Recompute
    tensors: tuple[Tensor | None, ...]


SavedOperand = Operand | RecomputedOperand


@dataclass(frozen=True, slots=True)
class _RecomputeTranspose:
    """Cast of the transpose of a matrix that was cast, and measured, before."""

    spec: CastSpec

    def compute(self, *tensors: Tensor | None) -> Operand:
        """Compute the operand from the matrix and the amax of its scale; None measures the matrix again.

        A delayed amax of 0 means that there is none yet; a dynamic one was measured in this matrix.
        """
        matrix, amax = tensors
        assert matrix is not None
        delayed = self.spec.scaling == Scaling.DELAYED
        nothing = AmaxRecord(None, None, None)  # its defaults would become a guard that calls Python for every call
        return cast(matrix.t(), self.spec, amax=amax, measure_if_zero=delayed, record=nothing).output


def operand_of(saved: SavedOperand) -> Operand:
    """Return the operand, computed now if it is a :class:`RecomputedOperand`."""
    return saved.recompute.compute(*saved.tensors) if isinstance(saved, RecomputedOperand) else saved


def save_operands(ctx: Any, operands: Sequence[SavedOperand | None], amaxes: Tensor | None) -> None:
    """Save operands for backward, and the layer's amaxes."""
    tensors: list[Tensor | None] = [amaxes]
    ctx.layouts = []
    for operand in operands:
        if isinstance(operand, RecomputedOperand):
            tensors += operand.tensors
            ctx.layouts.append((len(operand.tensors), operand.recompute))
        elif isinstance(operand, QuantizedTensor):
            tensors += [operand.data, operand.scale]
            ctx.layouts.append((2, (operand.granularity, operand.hp_dtype)))
        else:
            tensors.append(operand)
            ctx.layouts.append((1, None))
    ctx.save_for_backward(*tensors)


def load_operands(ctx: Any) -> tuple[list[SavedOperand | None], Tensor | None]:
    """Return the operands and amaxes that :func:`save_operands` saved."""
    amaxes, *tensors = ctx.saved_tensors
    operands: list[SavedOperand | None] = []
    at = 0
    for count, layout in ctx.layouts:
        parts = tensors[at : at + count]
        at += count
        if layout is None:
            operands.append(parts[0])
        elif isinstance(layout, tuple):
            operands.append(QuantizedTensor(*parts, *layout))
        else:
            operands.append(RecomputedOperand(layout, tuple(parts)))
    return operands, amaxes


def cast_operand(
    x: Tensor, spec: CastSpec | None, scaling: OperandScaling | None = None, *, transposed: bool = False
) -> Operand:
    """Cast ``x`` as one operand of a GEMM.

    Args:
        x: a matrix whose last dimension the GEMM sums over.
        spec: how to cast; None leaves ``x`` as it is.
        scaling: records the measurement, and gives a delayed cast its amax (where that is 0 or ``scaling`` is None,
            the amax of ``x`` is used) and a static cast its scale.
        transposed: cast the transpose of ``x`` instead.
    """
    matrix = x.t() if transposed else x
    if spec is None:
        return matrix
    scaling = OperandScaling() if scaling is None else scaling
    amax, scale = _amax(x, spec, scaling, transposed=transposed), _scale(spec, scaling)
    return cast(matrix, spec, amax=amax, scale=scale, measure_if_zero=True, record=scaling.take()).output


def quantize_operand(x: Tensor, spec: CastSpec) -> QuantizedTensor:
    """Cast ``x`` with scales from its own amax, also where ``spec`` takes them from a history or a calibration."""
    quantized = cast_operand(x, replace(spec, scaling=Scaling.DYNAMIC))
    assert isinstance(quantized, QuantizedTensor)
    return quantized


def cast_both_ways(
    x: Tensor, spec: CastSpec | None, transposed_spec: CastSpec | None, scaling: OperandScaling
) -> tuple[Operand, Operand]:
    """Cast ``x`` as ``spec``, and its transpose as ``transposed_spec``; in one call where both are the same."""
    same = spec is not None and spec == transposed_spec  # "!=" is more than a tracer can compare
    if spec is not None and same and (scaling.slices is None or spec.granularity.orientation_free):
        amax, scale = _amax(x, spec, scaling), _scale(spec, scaling)
        result = cast(x, spec, amax=amax, scale=scale, measure_if_zero=True, transpose=True, record=scaling.take())
        assert result.transposed is not None
        return result.output, result.transposed
    return cast_operand(x, spec, scaling), cast_operand(x, transposed_spec, scaling, transposed=True)


def _amax(x: Tensor, spec: CastSpec, scaling: OperandScaling, *, transposed: bool = False) -> Tensor | None:
    """Amax of a delayed cast, or of a slice's whole matrix; None for other casts, which measure."""
    if spec.scaling == Scaling.STATIC:
        return None
    is_delayed, slices = spec.scaling == Scaling.DELAYED, scaling.slices
    past = scaling.amax if is_delayed else None
    if slices is None or (is_delayed and slices.has_past):
        return past
    is_whole = isinstance(spec.granularity, PerTensor)
    amax = scaling.reduced if is_whole else None
    if amax is None:
        amax = slices.amax(x, spec.granularity, transposed=transposed)
    if is_whole:
        scaling.reduced = amax
    return amax if past is None or amax is None else torch.where(past > 0, past, amax)


def _scale(spec: CastSpec, scaling: OperandScaling) -> Tensor | None:
    """Scale of a static cast; None for other casts."""
    if spec.scaling == Scaling.STATIC and scaling.scale is None:
        raise ConfigError("a static cast has no scale; calibrate the model, or load its scaling state")
    return scaling.scale if spec.scaling == Scaling.STATIC else None


@dataclass(frozen=True, slots=True)
class InputOperands:
    """Operands of an input.

    Attributes:
        output: [M, K], the left operand of the output GEMM.
        transposed: [K, M], the right operand of grad_weight's GEMM; None where ``output``'s own transpose serves, or
            where the weight takes no gradient.
    """

    output: Operand
    transposed: SavedOperand | None = None

    def for_grad_weight(self) -> SavedOperand:
        """Return the right operand of grad_weight's GEMM, [K, M]."""
        return self.output.t() if self.transposed is None else self.transposed


def cast_input(
    x: Tensor, recipe: Recipe, scaling: OperandScaling, *, learning: bool, watched: bool = False
) -> InputOperands:
    """Cast an input.

    Args:
        x: [M, K], not float64.
        recipe: the casts.
        scaling: as for :func:`cast_operand`.
        learning: whether the weight takes a gradient.
        watched: cast for grad_weight now in any case.
    """
    spec, transposed_spec = recipe.output.a, recipe.grad_weight.b
    if not learning:
        return InputOperands(cast_operand(x, spec, scaling))
    if transposed_spec is not None and not watched and _codes_are_larger(x, transposed_spec):
        amax = _amax(x, transposed_spec, scaling, transposed=True)
        recomputed = RecomputedOperand(_RecomputeTranspose(transposed_spec), (x, amax))
        return InputOperands(cast_operand(x, spec, scaling), recomputed)
    return InputOperands(*cast_both_ways(x, spec, transposed_spec, scaling))


def _codes_are_larger(x: Tensor, spec: CastSpec) -> bool:
    """Return whether the transpose's codes and scales take more bytes than ``x``, as with few rows."""
    return not spec.granularity.orientation_free and _always_true(_bytes_of_codes(x.t().shape, spec) > _bytes_saved(x))


def cast_grad_output(
    grad_output: Tensor, recipe: Recipe, scaling: OperandScaling, *, for_input: bool, for_weight: bool
) -> tuple[Operand, Operand]:
    """Cast the left operands of grad_input's GEMM, [M, N], and grad_weight's, [N, M]; leave one that is not needed."""
    if for_input and for_weight:
        return cast_both_ways(grad_output, recipe.grad_input.a, recipe.grad_weight.a, scaling)
    if for_input:
        return cast_operand(grad_output, recipe.grad_input.a, scaling), grad_output
    return grad_output, cast_operand(
        grad_output, recipe.grad_weight.a, scaling, transposed=True
    ) if for_weight else grad_output


class WeightOperands:
    """Operands of a weight, each cast on first use and kept.

    A parameter is in memory in any case, and under FSDP2 its memory is freed between forward and backward. So
    backward casts a weight again where that costs no more than saving its codes; :func:`recasts_weight` says where.

    Args:
        weight: [N, K] in high precision, or the FP8 codes that are stored instead and used unchanged.
        recipe: the casts.
        scaling: for casts of a weight in high precision.
        recast: save the weight itself for grad_input, if it has a cast of its own, and cast it again in backward.
        transposed: the right operand of grad_input's GEMM, [K, N], where it is known; None casts it when it is needed.
    """

    def __init__(
        self,
        weight: Operand,
        recipe: Recipe,
        scaling: OperandScaling | None = None,
        *,
        recast: bool = False,
        transposed: SavedOperand | None = None,
    ) -> None:
        self._weight, self._recipe = weight, recipe
        self._scaling = OperandScaling() if scaling is None else scaling
        self._recast = recast
        self._output: Operand | None = None
        self._transposed = transposed

    def output(self, *, with_grad_input: bool = False) -> Operand:
        """Return the right operand of the output GEMM, [N, K].

        ``with_grad_input`` casts for :meth:`for_grad_input` in the same call.
        """
        if self._output is None:
            weight, spec, transposed_spec = self._weight, self._recipe.output.b, self._recipe.grad_input.b
            both = with_grad_input and self._transposed is None
            if isinstance(weight, QuantizedTensor):
                self._output = weight
            elif both and self._recast and spec is not None and transposed_spec is not None:
                self._output, self._transposed = _cast_and_recast(weight, spec, transposed_spec, self._scaling)
            elif both:
                self._output, self._transposed = cast_both_ways(weight, spec, transposed_spec, self._scaling)
            else:
                self._output = cast_operand(weight, spec, self._scaling)
        return self._output

    def for_grad_input(self) -> tuple[SavedOperand, bool]:
        """Return the right operand of grad_input's GEMM, and whether it still has to be transposed to [K, N]."""
        output, transposed_spec = self.output(with_grad_input=True), self._recipe.grad_input.b
        if self._transposed is None:
            spec = transposed_spec if isinstance(self._weight, QuantizedTensor) else self._recipe.output.b
            if serves_both_ways(output, spec, transposed_spec):
                return output, True
            weight = self._weight
            decoded = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
            self._transposed = cast_operand(decoded, transposed_spec, self._scaling, transposed=True)
        return self._transposed, False


def serves_both_ways(operand: Operand | None, spec: CastSpec | None, transposed_spec: CastSpec | None) -> bool:
    """Return whether an operand cast as ``spec``, transposed, is the transpose cast as ``transposed_spec``."""
    return isinstance(operand, QuantizedTensor) and spec == transposed_spec and operand.granularity.orientation_free


def _cast_and_recast(
    weight: Tensor, spec: CastSpec, transposed_spec: CastSpec, scaling: OperandScaling
) -> tuple[Operand, RecomputedOperand]:
    """The right operand of the output GEMM, cast as ``spec``, and grad_input's, which backward casts.

    A tensorwise scale is computed from one amax in both casts, so that the weight is not measured twice: a delayed
    cast's amax is passed, a dynamic cast's is recorded, unless the layer's history takes the record.
    """
    amax = _amax(weight, transposed_spec, scaling, transposed=True)
    measures = amax is None and isinstance(transposed_spec.granularity, PerTensor)
    if measures and transposed_spec == spec and scaling.pending is None:
        amax = scaling.pending = torch.zeros((), dtype=torch.float32, device=weight.device)
    return cast_operand(weight, spec, scaling), RecomputedOperand(_RecomputeTranspose(transposed_spec), (weight, amax))


def recasts_weight(weight: Tensor, x: Tensor, recipe: Recipe, saved_input: SavedOperand | None) -> bool:
    """Return whether backward casts a weight again, a parameter, and forward saves no codes of it.

    It does on a GPU, whose GEMM reads both operands along the dimension that it sums over, so that the transpose needs
    a separate cast; and where saved codes would make the layer save more than in bfloat16.

    Args:
        weight: [N, K].
        x: [M, K].
        recipe: the casts.
        saved_input: the operand saved for the weight's gradient; None where there is none.
    """
    spec, transposed_spec = recipe.output.b, recipe.grad_input.b
    if spec is None or transposed_spec is None:
        return False
    if weight.is_cuda or not (spec == transposed_spec and spec.granularity.orientation_free):
        return True
    in_bfloat16 = 0 if saved_input is None else _BFLOAT16_BYTES * x.numel()
    if weight.itemsize > x.itemsize:  # as under torch.autocast, which keeps its copy of the weight
        in_bfloat16 += _BFLOAT16_BYTES * weight.numel()
    return _always_true(_bytes_saved(saved_input) + _bytes_of_codes(weight.shape, spec) > in_bfloat16)


def _bytes_saved(saved: SavedOperand | None) -> int:
    """Bytes that an operand takes from forward to backward."""
    if isinstance(saved, QuantizedTensor):
        return _bytes_saved(saved.data) + _bytes_saved(saved.scale)
    if isinstance(saved, RecomputedOperand):
        return sum(_bytes_saved(tensor) for tensor in saved.tensors)
    return 0 if saved is None else saved.numel() * saved.itemsize  # a tensor of symbolic shape has no nbytes


def _bytes_of_codes(shape: torch.Size, spec: CastSpec) -> int:
    """Bytes of a tensor's codes and scales."""
    scales = math.prod(spec.granularity.scale_shape(shape))  # Size.numel() would make constants of symbols
    return math.prod(shape) + scales * spec.scale_format.torch_dtype.itemsize


def _always_true(comparison: bool) -> bool:
    """Return whether a comparison of sizes is true; with symbolic sizes, always true, so that a graph gets no guard."""
    if not is_tracing():
        return comparison
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # the import takes a third of a second

    return statically_known_true(comparison)

"""Operands that forward saves for backward: codes, or the tensors to recompute them from.

Codes are one byte an element. Codes of a parameter, or of a tensor that is saved anyway, need not be saved: a
:class:`RecomputedOperand` stands for an operand that backward recomputes, bit for bit, when its GEMM runs.

All is saved as plain tensors: activation checkpointing and saved-tensor hooks see them, and autograd raises where they
have changed in place. As everywhere in torch it does not see what fused optimizers write, nor what is written through
``.data``: an operand recomputed then is the new weight's, cast with the scale of the old one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo.kernels import cast
from octavo.kernels.tracing import is_recorded
from octavo.numerics import CastSpec, QuantizedTensor, Record
from octavo.scaling import Operand

__all__ = [
    "Recompute",
    "RecomputeTranspose",
    "RecomputedOperand",
    "SavedOperand",
    "bytes_of_codes",
    "bytes_saved",
    "holds",
    "load_operands",
    "operand_of",
    "save_operands",
]


class Recompute(Protocol):
    """How an operand is recomputed. It holds no tensors: those go where autograd sees them."""

    def compute(self, *tensors: Tensor | None) -> Operand:
        """The operand, with the same bits each time."""
        ...


@dataclass(frozen=True, slots=True)
class RecomputedOperand:
    """An operand that backward recomputes.

    Attributes:
        recompute: computes it.
        tensors: of these.
    """

    recompute: Recompute
    tensors: tuple[Tensor | None, ...]


SavedOperand = Operand | RecomputedOperand


@dataclass(frozen=True, slots=True)
class RecomputeTranspose:
    """Casts the transpose of a matrix that was cast, and measured, before."""

    spec: CastSpec

    def compute(self, *tensors: Tensor | None) -> Operand:
        """The operand, of the matrix and of the amax that its scale is made from; None measures the matrix again."""
        matrix, amax = tensors
        assert matrix is not None
        return cast(matrix.t(), self.spec, amax=amax, measure_if_zero=True, into=Record()).output


def operand_of(saved: SavedOperand) -> Operand:
    """The operand itself, computed now if it is a :class:`RecomputedOperand`."""
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
    """The operands and amaxes that :func:`save_operands` saved."""
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


def bytes_saved(saved: SavedOperand | None) -> int:
    """Bytes that an operand takes from forward to backward."""
    if isinstance(saved, QuantizedTensor):
        return bytes_saved(saved.data) + bytes_saved(saved.scale)
    if isinstance(saved, RecomputedOperand):
        return sum(bytes_saved(tensor) for tensor in saved.tensors)
    return 0 if saved is None else saved.numel() * saved.itemsize  # a tensor of symbolic shape has no nbytes


def bytes_of_codes(shape: torch.Size, spec: CastSpec) -> int:
    """Bytes of a tensor's codes and scales."""
    scales = math.prod(spec.granularity.scale_shape(shape))  # Size.numel() would make constants of symbols
    return math.prod(shape) + scales * spec.scale_format.torch_dtype.itemsize


def holds(comparison: bool) -> bool:
    """Whether a comparison of sizes holds; of symbolic ones, whether for all of them, so that a graph gets no guard."""
    if not is_recorded():
        return comparison
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # takes a third of a second

    return statically_known_true(comparison)

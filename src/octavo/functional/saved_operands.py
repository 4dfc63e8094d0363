"""Operands that forward saves for backward: codes, or the tensors to recompute them from.

Codes are one byte an element. Codes of a parameter, or of a tensor that is saved anyway, need not be saved: a
:class:`RecomputedOperand` stands for an operand that backward recomputes, bit for bit, when its GEMM runs.

All is saved as plain tensors: activation checkpointing and saved-tensor hooks see them, and autograd raises where they
have changed in place. As everywhere in torch it does not see what fused optimizers write, nor what is written through
``.data``: an operand recomputed then is the new weight's, cast with the scale of the old one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from octavo.numerics import QuantizedTensor
from octavo.scaling import Operand

__all__ = ["Recompute", "RecomputedOperand", "SavedOperand", "load_operands", "operand_of", "save_operands"]


class Recompute(Protocol):
    """How an operand is made. It holds no tensors: those go where autograd sees them."""

    def make(self, *tensors: Tensor | None) -> Operand:
        """The operand, with the same bits each time."""
        ...


@dataclass(frozen=True, slots=True)
class RecomputedOperand:
    """An operand that is made when it is used.

    Attributes:
        maker: makes it.
        tensors: of these.
    """

    maker: Recompute
    tensors: tuple[Tensor | None, ...]


SavedOperand = Operand | RecomputedOperand


def operand_of(kept: SavedOperand) -> Operand:
    """The operand itself, made now if it is a :class:`RecomputedOperand`."""
    return kept.maker.make(*kept.tensors) if isinstance(kept, RecomputedOperand) else kept


def save_operands(ctx: Any, operands: Sequence[SavedOperand | None], amaxes: Tensor | None) -> None:
    """Save operands for backward, and the layer's amaxes."""
    tensors: list[Tensor | None] = [amaxes]
    ctx.layouts = []
    for operand in operands:
        if isinstance(operand, RecomputedOperand):
            tensors += operand.tensors
            ctx.layouts.append((len(operand.tensors), operand.maker))
        elif isinstance(operand, QuantizedTensor):
            tensors += [operand.data, operand.scale]
            ctx.layouts.append((2, (operand.granularity, operand.hp_dtype)))
        else:
            tensors.append(operand)
            ctx.layouts.append((1, None))
    ctx.save_for_backward(*tensors)


def load_operands(ctx: Any) -> tuple[list[SavedOperand | None], Tensor | None]:
    """What :func:`save_operands` saved."""
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

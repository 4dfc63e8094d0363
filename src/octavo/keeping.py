"""What a backward pass keeps of its operands: their codes, or what it takes to make them again.

Codes are one byte an element. What was made of a parameter, or of a tensor that is kept anyway, need not be kept at
all: a :class:`Later` stands for an operand that the backward pass makes again, bit for bit, when its GEMM runs.

All is saved as plain tensors: activation checkpointing and saved-tensor hooks see them, and autograd refuses to give
them back once somebody has changed them. As everywhere in torch it does not see what fused optimizers write, nor what
is written through ``.data``: what is made again then is the new weight's, by the scale of the old one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from octavo.numerics import QuantizedTensor
from octavo.observers import Operand

__all__ = ["Kept", "Later", "Maker", "keep_operands", "kept_operands", "operand_of"]


class Maker(Protocol):
    """How an operand is made. It holds no tensors: those go where autograd sees them."""

    def make(self, *tensors: Tensor | None) -> Operand:
        """The operand, with the same bits each time."""
        ...


@dataclass(frozen=True, slots=True)
class Later:
    """An operand that is made when it is used.

    Attributes:
        maker: makes it.
        tensors: of these.
    """

    maker: Maker
    tensors: tuple[Tensor | None, ...]


Kept = Operand | Later


def operand_of(kept: Kept) -> Operand:
    """The operand itself, made now if it is a :class:`Later`."""
    return kept.maker.make(*kept.tensors) if isinstance(kept, Later) else kept


def keep_operands(ctx: Any, operands: Sequence[Kept | None], amaxes: Tensor | None) -> None:
    """Save operands for backward, and the layer's amaxes."""
    tensors: list[Tensor | None] = [amaxes]
    ctx.layouts = []
    for operand in operands:
        if isinstance(operand, Later):
            tensors += operand.tensors
            ctx.layouts.append((len(operand.tensors), operand.maker))
        elif isinstance(operand, QuantizedTensor):
            tensors += [operand.data, operand.scale]
            ctx.layouts.append((2, (operand.granularity, operand.hp_dtype)))
        else:
            tensors.append(operand)
            ctx.layouts.append((1, None))
    ctx.save_for_backward(*tensors)


def kept_operands(ctx: Any) -> tuple[list[Kept | None], Tensor | None]:
    """What :func:`keep_operands` saved."""
    amaxes, *tensors = ctx.saved_tensors
    operands: list[Kept | None] = []
    at = 0
    for count, layout in ctx.layouts:
        parts = tensors[at : at + count]
        at += count
        if layout is None:
            operands.append(parts[0])
        elif isinstance(layout, tuple):
            operands.append(QuantizedTensor(*parts, *layout))
        else:
            operands.append(Later(layout, tuple(parts)))
    return operands, amaxes

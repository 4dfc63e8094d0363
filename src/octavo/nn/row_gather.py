"""The gather of an input whose rows ranks divide, as FP8 codes: sequence parallelism before a layer by columns.

Each rank casts its own rows, with scales that are those of the whole matrix (:mod:`octavo.scaling.slices`), and all
ranks' codes and scales are gathered by one collective of bytes. They are bit for bit those of a cast after the gather.

| scales of the input         | known before the gather by         | bytes an element: evaluation, training         |
|-----------------------------|------------------------------------|------------------------------------------------|
| of the tensor, dynamic      | one all-reduce of an amax          | 1, 1                                           |
| of the tensor, delayed      | the amaxes of finished steps       | 1, 1                                           |
| of rows                     | the rank's own; of the transpose:  | 1 and a scale a row, 2                         |
|                             | one all-reduce of a row            |                                                |
| of blocks                   | the rank's own blocks              | 1 and the blocks' scales, 2                    |

In training a recipe that casts the transpose for the weight's gradient by other groups needs codes of both. Gradients
of the input are summed as DTensor sums them, in the input's dtype.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from octavo.functional import InputOperands
from octavo.functional.saved_operands import cast_operand, serves_both_ways
from octavo.kernels.tracing import finished
from octavo.numerics import PerBlock, PerRow, QuantizedTensor
from octavo.recipes import Recipe
from octavo.scaling import OperandScaling

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["RowGather"]


@dataclass(frozen=True, slots=True)
class RowGather:
    """A gather of equal parts along one dimension of an input.

    Attributes:
        mesh: the ranks.
        dim: the divided dimension, not the last.
        shape: of this rank's part, [..., K].
    """

    mesh: "DeviceMesh"
    dim: int
    shape: torch.Size

    @property
    def whole_shape(self) -> torch.Size:
        """Shape of the whole input."""
        sizes = list(self.shape)
        sizes[self.dim] *= self.mesh.size()
        return torch.Size(sizes)

    def operands(self, rows: Tensor, recipe: Recipe, scaling: OperandScaling, *, learning: bool) -> InputOperands:
        """Cast this rank's rows [m, K] and gather all ranks' codes.

        Args:
            rows: of this rank's part, not float64.
            recipe: casts the input for both of its GEMMs.
            scaling: of slices that divide the rows.
            learning: whether the weight takes a gradient.
        """
        spec, transposed_spec = recipe.output.a, recipe.grad_weight.b
        parts = [cast_operand(rows, spec, scaling)]
        if learning and not serves_both_ways(parts[0], spec, transposed_spec):
            parts.append(cast_operand(rows, transposed_spec, scaling, transposed=True))
        return InputOperands(*self._gathered([part for part in parts if isinstance(part, QuantizedTensor)]))

    def stand_in(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor of the whole input's shape without values, which passes its gradient on to ``x``.

        Args:
            x: this rank's part.
            dtype: of the stand-in.
        """
        whole: Tensor = _StandIn.apply(x, self, dtype)  # type: ignore[no-untyped-call]
        return whole

    def _gathered(self, parts: list[QuantizedTensor]) -> list[QuantizedTensor]:
        """The whole operands of [m, K], and of the transpose [K, m]."""
        tensors = [(each, axis) for axis, part in enumerate(parts) for each in self._divided(part, axis)]
        own = [tensor.flatten().contiguous().view(torch.uint8) for tensor, _ in tensors]
        sent = torch.cat(own)
        received = sent.new_empty(self.mesh.size(), sent.numel())
        # Before torch 2.13 it has only its former name.
        gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
        gather(received.view(-1), sent, group=self.mesh.get_group())
        pieces = received.split([each.numel() for each in own], dim=1)
        wholes = [self._joined(piece, *each) for piece, each in zip(pieces, tensors, strict=True)]
        operands = []
        for axis, part in enumerate(parts):
            data = wholes.pop(0)
            scale = wholes.pop(0) if len(self._divided(part, axis)) > 1 else part.scale
            operands.append(QuantizedTensor(data, scale, part.granularity, part.hp_dtype))
        return operands

    @staticmethod
    def _divided(part: QuantizedTensor, axis: int) -> tuple[Tensor, ...]:
        """Codes, and scales of which each rank has others."""
        own = isinstance(part.granularity, PerBlock) or (isinstance(part.granularity, PerRow) and axis == 0)
        return (part.data, part.scale) if own else (part.data,)

    def _joined(self, received: Tensor, part: Tensor, axis: int) -> Tensor:
        """All ranks' parts along an axis, in the order of the whole input's rows.

        Rows lie together in segments, one for each index of the dimensions before the divided one.
        """
        segments = self.shape[: self.dim].numel() * part.shape[:axis].numel()
        ranks = self.mesh.size()
        length = received.numel() // max(1, ranks * segments)  # of a segment; an empty batch has none
        ordered = received.reshape(ranks, segments, length).transpose(0, 1).reshape(-1).view(part.dtype)
        sizes = list(part.shape)
        sizes[axis] *= ranks
        return ordered.view(sizes)


class _StandIn(torch.autograd.Function):
    """See :meth:`RowGather.stand_in`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gather: RowGather, dtype: torch.dtype) -> Tensor:
        ctx.gather, ctx.dtype = gather, x.dtype
        return x.new_zeros((), dtype=dtype).expand(gather.whole_shape)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        from torch.distributed.tensor import DTensor, Partial, Shard

        gather = ctx.gather
        partial = DTensor.from_local(grad_output.to(ctx.dtype), gather.mesh, (Partial(),), run_check=False)
        return finished(partial.redistribute(placements=(Shard(gather.dim),)).to_local()), None, None

"""Arguments and results of kernels that cast their own result: norms and activations."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.formats import E8M0
from octavo.kernels.backend import CastResult
from octavo.kernels.triton.launching import allocate
from octavo.numerics import CastSpec, Measurement, PerTensor, QuantizedTensor
from octavo.numerics.quantized import stored_scale

__all__ = ["NormSpec", "ResultBuffers", "ResultCast", "new_buffers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """A norm over the last dimension.

    Attributes:
        layer: LayerNorm, else RMSNorm.
        eps: added to the variance or mean square.
        zero_centered: whether the gain is stored as w - 1.
    """

    layer: bool
    eps: float
    zero_centered: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultCast:
    """Cast of a fused kernel's result [R, H].

    Attributes:
        spec: how to cast; one scale for the tensor, a row, or up to 128 of a row.
        direct: whether the result itself is cast.
        transpose: whether the transpose [H, R] is cast too, by the same rules.
    """

    spec: CastSpec
    direct: bool = True
    transpose: bool


class ResultBuffers(NamedTuple):
    """Memory that a fused kernel writes instead of its result: an operator's results."""

    codes: Tensor  # [R, H], the format's dtype; [0, 0] if not asked for
    scale: Tensor  # the granularity's shape; not written where one was given
    transposed: Tensor  # [H, R]; [0, 0] if not asked for
    transposed_scale: Tensor
    measured: Tensor  # int32 [2]: bits of the FP32 amax of the whole result, number of NaN and ±Inf

    def result(self, cast: ResultCast, hp_dtype: torch.dtype, scale: Tensor | None) -> CastResult:
        """The operands that were asked for, and what was measured in the result as a whole.

        Args:
            cast: how it was cast. With scales per row or block nothing is measured but the number of NaN and ±Inf.
            hp_dtype: of the result that was not written.
            scale: the decode scale that was given.
        """
        spec = cast.spec
        output_scale = self.scale if scale is None else stored_scale(scale.detach().float(), spec.scale_format)
        output = QuantizedTensor(self.codes, output_scale, spec.granularity, hp_dtype)
        measurement = Measurement(self.measured[0].view(torch.float32), self.measured[1])
        if not cast.transpose:
            return CastResult(output, None, measurement)
        transposed_scale = output_scale if isinstance(spec.granularity, PerTensor) else self.transposed_scale
        transposed = QuantizedTensor(self.transposed, transposed_scale, spec.granularity, hp_dtype)
        return CastResult(output, transposed, measurement)


def new_buffers(x: Tensor, columns: int, cast: ResultCast) -> ResultBuffers:
    """Memory for a result with this many columns."""
    nothing = torch.Size([0, 0])
    shape = torch.Size([x.shape[0], columns]) if cast.direct else nothing
    transposed = torch.Size([columns, x.shape[0]]) if cast.transpose else nothing
    scale_dtype = torch.uint8 if cast.spec.scale_format == E8M0 else torch.float32
    scales = [allocate(x, cast.spec.granularity.scale_shape(size), scale_dtype) for size in (shape, transposed)]
    codes = [x.new_empty(size, dtype=cast.spec.format.torch_dtype) for size in (shape, transposed)]
    return ResultBuffers(codes[0], scales[0], codes[1], scales[1], x.new_empty(2, dtype=torch.int32))

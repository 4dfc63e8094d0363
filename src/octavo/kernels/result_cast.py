"""What a kernel that casts its own result is told, and what it writes instead of the result."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.formats import E8M0, FP32, Format
from octavo.kernels.native_bindings import ScaleRule
from octavo.kernels.triton.launching import allocate
from octavo.numerics import Granularity, Measurement, Nonfinite, PerTensor, QuantizedTensor
from octavo.numerics.quantized import stored_scale

__all__ = ["CastResult", "NormSpec", "ResultCast", "new_result"]


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
    """How a result [R, H] is cast; the fields are those of :func:`octavo.quantize`.

    Attributes:
        format: E4M3 or E5M2.
        granularity: one scale for the tensor, a row, or up to 128 of a row.
        rule: how amaxes become scales.
        scale_format: FP32 or E8M0.
        nonfinite: what an infinite element becomes.
        direct: whether the result itself is cast.
        transpose: whether the transpose [H, R] is cast too, by the same rules.
    """

    format: Format
    granularity: Granularity
    rule: ScaleRule
    scale_format: Format = FP32
    nonfinite: Nonfinite = Nonfinite.PROPAGATE
    direct: bool = True
    transpose: bool


class CastResult(NamedTuple):
    """What a fused kernel writes instead of its result."""

    codes: Tensor  # [R, H], the format's dtype; [0, 0] if not asked for
    scale: Tensor  # the granularity's shape; not written where one was given
    transposed: Tensor  # [H, R]; [0, 0] if not asked for
    transposed_scale: Tensor
    found: Tensor  # int32 [2]: bits of the FP32 amax of the whole result, number of NaN and ±Inf

    def operands(
        self, cast: ResultCast, hp_dtype: torch.dtype, scale: Tensor | None
    ) -> tuple[QuantizedTensor, QuantizedTensor | None]:
        """The result and, if asked for, its transpose; ``scale`` is what was given."""
        given = self.scale if scale is None else stored_scale(scale.detach().float(), cast.scale_format)
        output = QuantizedTensor(self.codes, given, cast.granularity, hp_dtype)
        if not cast.transpose:
            return output, None
        turned = given if isinstance(cast.granularity, PerTensor) else self.transposed_scale
        return output, QuantizedTensor(self.transposed, turned, cast.granularity, hp_dtype)

    def measurement(self) -> Measurement:
        """What was found in the result as a whole. With scales per row or block it has no amax."""
        return Measurement(self.found[0].view(torch.float32), self.found[1])


def new_result(x: Tensor, columns: int, cast: ResultCast) -> CastResult:
    """Memory for a result with this many columns."""
    nothing = torch.Size([0, 0])
    shape = torch.Size([x.shape[0], columns]) if cast.direct else nothing
    turned = torch.Size([columns, x.shape[0]]) if cast.transpose else nothing
    scale_dtype = torch.uint8 if cast.scale_format == E8M0 else torch.float32
    scales = [allocate(x, cast.granularity.scale_shape(size), scale_dtype) for size in (shape, turned)]
    codes = [x.new_empty(size, dtype=cast.format.torch_dtype) for size in (shape, turned)]
    return CastResult(codes[0], scales[0], codes[1], scales[1], x.new_empty(2, dtype=torch.int32))

"""Weights of a decoder's linear layers in the formats that are served, with the casts of their inputs.

    y = cast(x) · weightᵀ + bias

| rows of the weight               | input             | cast(x)                                          |
|----------------------------------|-------------------|--------------------------------------------------|
| bfloat16                         | NONE              | x, FP32                                          |
| FP8 codes, a scale per row       | NONE              | x                                                |
|                                  | E4M3_DYNAMIC      | E4M3, a scale per row of x                       |
|                                  | E4M3_STATIC       | E4M3 with one scale from calibration             |
| FP8 codes, scales per row and    | NONE              | x                                                |
| block of K                       | E4M3_DYNAMIC      | E4M3, a scale per row of x and block of K        |
| INT8 codes, a scale per row      | INT8_DYNAMIC      | INT8, a scale per row of x                       |

Blocks of several rows, as files have them, are stored as a row each with its block's scale: the same products.
A dynamic scale over several rows of x is not supported: the rounding of a row would depend on the other rows.
"""

from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from octavo.errors import BackendError
from octavo.formats import BF16
from octavo.kernels import native_bindings as cpu
from octavo.numerics import PerBlock, PerRow, QuantizedTensor
from octavo.numerics.integers import MOST_TERMS, Int8Rows

__all__ = ["DecoderWeight", "InputCast", "Saturation"]

Rows = Tensor | QuantizedTensor | Int8Rows


class InputCast(Enum):
    """Cast of an input; values as in native/kernels.h."""

    NONE = 0
    E4M3_DYNAMIC = 1
    E4M3_STATIC = 2
    INT8_DYNAMIC = 3


@dataclass(slots=True)
class Saturation:
    """Counts of elements cast with static scales.

    Attributes:
        elements: elements cast.
        saturated: finite elements out of range, which became ±E4M3's maximum.
    """

    elements: int = 0
    saturated: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeight:
    """Weight of one linear layer, or of several with the same input, concatenated by rows.

    Attributes:
        rows: [N, K], in a format of the table above.
        bias: float32 [N], or None.
        input: cast of the input.
        input_scale: float32 [], only for E4M3_STATIC.

    Raises:
        BackendError: rows, bias, cast and scale do not match.
    """

    rows: Rows
    bias: Tensor | None = None
    input: InputCast = InputCast.NONE
    input_scale: Tensor | None = None

    def __post_init__(self) -> None:
        if self.input not in _casts_of(self.rows):
            allowed = " or ".join(cast.name for cast in _casts_of(self.rows)) or "nothing"
            raise BackendError(f"an input of {_words(self.rows)} is cast {allowed}, not {self.input.name}")
        if (self.input_scale is not None) != (self.input is InputCast.E4M3_STATIC):
            raise BackendError("input_scale is for the cast E4M3_STATIC, which needs it, and for no other")
        if self.bias is not None and self.bias.shape != self.shape[:1]:
            raise BackendError(
                f"a weight {tuple(self.shape)} has a bias [{self.shape[0]}], not {tuple(self.bias.shape)}"
            )
        if isinstance(self.rows, Int8Rows) and self.shape[1] > MOST_TERMS:
            raise BackendError(f"sums of integers have at most {MOST_TERMS} terms, and this weight has {self.shape[1]}")

    @property
    def shape(self) -> torch.Size:
        """[N, K]."""
        return self.data.shape

    @property
    def data(self) -> Tensor:
        """Codes, or values in BF16."""
        return self.rows if isinstance(self.rows, Tensor) else self.rows.data

    @property
    def block(self) -> int:
        """Columns of K that share a scale; 0 if all do."""
        granularity = self.rows.granularity if isinstance(self.rows, QuantizedTensor) else None
        return granularity.columns if isinstance(granularity, PerBlock) else 0

    @property
    def scale(self) -> Tensor | None:
        """float32 [N, 1] or [N, blocks of K], or None for BF16."""
        if isinstance(self.rows, Tensor):
            return None
        return self.rows.scale if isinstance(self.rows, Int8Rows) else self.rows.fp32_scale

    @property
    def nbytes(self) -> int:
        """Bytes of data, scales and bias."""
        return sum(tensor.nbytes for tensor in (self.data, self.scale, self.bias) if tensor is not None)

    def part(self, rows: slice) -> "DecoderWeight":
        """View of some rows."""
        weight, bias = self.rows, None if self.bias is None else self.bias[rows]
        if isinstance(weight, Tensor):
            return replace(self, rows=weight[rows], bias=bias)
        return replace(self, rows=replace(weight, data=weight.data[rows], scale=weight.scale[rows]), bias=bias)

    def dequantize(self, indices: Tensor | None = None) -> Tensor:
        """Dequantize all rows, or those of ``indices``, to float32."""
        data, scale = self.data, self.scale
        if indices is not None:
            as_bytes = data.view(torch.uint8) if data.element_size() == 1 else data  # torch cannot index FP8
            data, scale = as_bytes[indices].view(data.dtype), None if scale is None else scale[indices]
        values = data.float()
        if scale is not None and self.block:
            scale = scale.repeat_interleave(self.block, dim=1)[:, : values.shape[1]]
        return values if scale is None else values * scale


def _casts_of(rows: Rows) -> tuple[InputCast, ...]:
    if isinstance(rows, Int8Rows):
        return (InputCast.INT8_DYNAMIC,)
    if isinstance(rows, Tensor):
        return (InputCast.NONE,) if rows.dtype == BF16.torch_dtype else ()
    if rows.data.dtype not in cpu.CODES:
        return ()
    if isinstance(rows.granularity, PerBlock) and rows.granularity.rows == 1:
        return (InputCast.NONE, InputCast.E4M3_DYNAMIC)
    of_rows = (InputCast.NONE, InputCast.E4M3_DYNAMIC, InputCast.E4M3_STATIC)
    return of_rows if isinstance(rows.granularity, PerRow) else ()


def _words(rows: Rows) -> str:
    if isinstance(rows, QuantizedTensor):
        return f"{rows.data.dtype} {rows.granularity}"
    return "INT8 rows" if isinstance(rows, Int8Rows) else str(rows.dtype)

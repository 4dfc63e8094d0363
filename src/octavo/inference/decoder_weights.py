"""The weights of a decoder's products, in any of the forms that are served, and what their inputs become first.

    y = cast(x) · weightᵀ + bias

| rows of the weight               | input             | cast(x)                                          |
|----------------------------------|-------------------|--------------------------------------------------|
| bfloat16                         | NONE              | x, FP32                                          |
| FP8 codes, a scale a row         | NONE              | x                                                |
|                                  | E4M3_DYNAMIC      | E4M3, a scale for every row of x                 |
|                                  | E4M3_STATIC       | E4M3 with the one scale that calibration found   |
| INT8 codes, a scale a row        | INT8_DYNAMIC      | INT8, a scale for every row of x                 |

A scale measured over several rows of x is not among them: a row would be rounded otherwise in other company.
"""

from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from octavo.errors import BackendError
from octavo.formats import BF16
from octavo.kernels import native_bindings as cpu
from octavo.numerics import PerRow, QuantizedTensor
from octavo.numerics.integers import MOST_TERMS, Int8Rows

__all__ = ["DecoderWeight", "InputCast", "Saturation"]

Rows = Tensor | QuantizedTensor | Int8Rows


class InputCast(Enum):
    """What an input becomes; the numbers are those of native/kernels.h."""

    NONE = 0
    E4M3_DYNAMIC = 1
    E4M3_STATIC = 2
    INT8_DYNAMIC = 3


@dataclass(slots=True)
class Saturation:
    """What static scales made of inputs, so far.

    Attributes:
        elements: that met one.
        saturated: finite ones beyond it, which became E4M3's maximum.
    """

    elements: int = 0
    saturated: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeight:
    """One linear layer of a decoder, or several that read the same input, below each other.

    Attributes:
        rows: [N, K], as in the table above.
        bias: float32 [N], or None.
        input: what the input becomes.
        input_scale: float32 [], of E4M3_STATIC alone.

    Raises:
        BackendError: rows, bias, cast and scale that do not go together.
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
            raise BackendError("a static cast has one scale, and no other has any")
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
        """Codes or numbers."""
        return self.rows if isinstance(self.rows, Tensor) else self.rows.data

    @property
    def scale(self) -> Tensor | None:
        """float32 [N, 1], or None of numbers."""
        if isinstance(self.rows, Tensor):
            return None
        return self.rows.scale if isinstance(self.rows, Int8Rows) else self.rows.fp32_scale

    @property
    def nbytes(self) -> int:
        """Of codes or numbers, scales and bias."""
        return sum(tensor.nbytes for tensor in (self.data, self.scale, self.bias) if tensor is not None)

    def part(self, rows: slice) -> "DecoderWeight":
        """Some of the rows, over the same memory."""
        own, bias = self.rows, None if self.bias is None else self.bias[rows]
        if isinstance(own, Tensor):
            return replace(self, rows=own[rows], bias=bias)
        return replace(self, rows=replace(own, data=own.data[rows], scale=own.scale[rows]), bias=bias)

    def dequantize(self, which: Tensor | None = None) -> Tensor:
        """The rows' values, float32; of some rows, where ``which`` names them."""
        data, scale = self.data, self.scale
        if which is not None:
            as_bytes = data.view(torch.uint8) if data.element_size() == 1 else data  # torch indexes no FP8
            data, scale = as_bytes[which].view(data.dtype), None if scale is None else scale[which]
        values = data.float()
        return values if scale is None else values * scale


def _casts_of(rows: Rows) -> tuple[InputCast, ...]:
    if isinstance(rows, Int8Rows):
        return (InputCast.INT8_DYNAMIC,)
    if isinstance(rows, Tensor):
        return (InputCast.NONE,) if rows.dtype == BF16.torch_dtype else ()
    if isinstance(rows.granularity, PerRow) and rows.data.dtype in cpu.CODES:
        return (InputCast.NONE, InputCast.E4M3_DYNAMIC, InputCast.E4M3_STATIC)
    return ()


def _words(rows: Rows) -> str:
    if isinstance(rows, QuantizedTensor):
        return f"{rows.data.dtype} {rows.granularity}"
    return "INT8 rows" if isinstance(rows, Int8Rows) else str(rows.dtype)

"""INT8 rows: what octavo serves beside FP8, and measures it with.

    scale = max(amax / 127.5, 2^-23)        code = clamp(round(x · (1 / scale)), -128, 127)        x ≈ code · scale

Half the range, 127.5, is torchao's choice: the largest element becomes 128 and is clamped to 127 if it is positive,
which costs it half a step and gives all others finer ones. A product of two such rows is a sum of integers, exact in 32
bits for up to 131,071 terms, whose order does not matter.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import ConfigError

__all__ = ["HALF_RANGE", "LEAST_SCALE", "MOST_TERMS", "Int8Rows", "quantize_int8"]

_CODES = torch.iinfo(torch.int8)
HALF_RANGE = (_CODES.max - _CODES.min) / 2
LEAST_SCALE = torch.finfo(torch.float32).eps
MOST_TERMS = torch.iinfo(torch.int32).max // _CODES.min**2


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """Rows of INT8 codes.

    Attributes:
        data: int8 [..., K].
        scale: float32 [..., 1]; decodes.
    """

    data: Tensor
    scale: Tensor

    def dequantize(self) -> Tensor:
        """``data · scale``, float32."""
        return self.data.float() * self.scale


def quantize_int8(x: Tensor) -> Int8Rows:
    """Every row with a scale of its own.

    Args:
        x: floating [..., K], at least one column. A row with NaN or Inf gets the scale NaN.

    Raises:
        ConfigError: rows without elements.

    Example:
        >>> rows = quantize_int8(torch.tensor([[1.0, -0.5, 0.25]]))
        >>> rows.data, float(rows.scale)
        (tensor([[127, -64,  32]], dtype=torch.int8), 0.007843137718737125)
    """
    if x.ndim == 0 or not x.shape[-1]:
        raise ConfigError(f"rows have at least one element, not shape {tuple(x.shape)}")
    amax = x.float().abs().amax(-1, keepdim=True)
    scale = torch.where(amax.isfinite(), (amax / HALF_RANGE).clamp(min=LEAST_SCALE), torch.nan)
    codes = (x.float() * (1 / scale)).round().clamp(_CODES.min, _CODES.max)
    return Int8Rows(codes.nan_to_num(0).to(torch.int8), scale)

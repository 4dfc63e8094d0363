"""What quantizing an operand must give: codes by the scalar reference, scales by a formula of fractions.

- Groups are found by index arithmetic, their amaxes by a scatter of maxima.
- Scales come from tests/oracle/scale_formula.py: fractions and IEEE doubles, one amax at a time.
- A code is what ``octavo.numerics.reference`` encodes ``fp32(x) · fp32(encode_scale)`` to. It is asked where its answer
  changes (bisection over FP32's bit patterns, once a format); between two such points it is constant.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.formats import E4M3, E8M0, FP32, Format
from octavo.numerics import Granularity, PerBlock, PerTensor, QuantizedTensor, ScaleRounding
from octavo.numerics.reference import encode
from tests.oracle.scale_formula import decode_scale, encode_scale

Values = NDArray[np.float32]


@dataclass(frozen=True)
class Operand:
    """One operand as the documentation's table has it."""

    fmt: Format = E4M3
    granularity: Granularity = field(default_factory=PerTensor)
    rounding: ScaleRounding = ScaleRounding.FP32
    scale_format: Format = FP32
    amax_floor: float = 0.0
    margin: int = 0


def expected_operand(
    row: Operand, x: Tensor, *, past_amax: float | None = None, scale: float | None = None
) -> QuantizedTensor:
    """``x`` [R, K] cast as ``row`` says.

    Args:
        past_amax: what a delayed scale is made from; ``x``'s own amax serves where it is 0 or None.
        scale: a static decode scale instead.
    """
    values = x.detach().float().numpy()
    group, shape = _groups(row.granularity, values.shape)
    if scale is not None:
        encodes = np.array([decode_scale(scale)], dtype=np.float32)
        decodes = np.array([scale], dtype=np.float32)
    else:
        amaxes = _amaxes(values, group, shape) if not past_amax else np.array([past_amax], dtype=np.float32)
        encodes, decodes = _scales(amaxes, row)
    codes = nearest_codes(values * encodes[group], row.fmt)
    stored = torch.from_numpy(decodes.reshape(shape))
    if row.scale_format == E8M0:
        stored = torch.from_numpy((np.frexp(decodes)[1] - 1 + 127).astype(np.uint8).reshape(shape))
    return QuantizedTensor(torch.from_numpy(codes).view(row.fmt.torch_dtype), stored, row.granularity, torch.float32)


def nearest_codes(scaled: Values, fmt: Format) -> NDArray[np.uint8]:
    """The reference's code of every element, saturating, infinities let through."""
    magnitudes = np.searchsorted(_first_of_each_code(fmt), np.abs(scaled), side="right").astype(np.uint8)
    codes = magnitudes | np.where(np.signbit(scaled), fmt.sign_mask, 0).astype(np.uint8)
    for index in zip(*np.nonzero(~np.isfinite(scaled)), strict=True):
        codes[index] = encode(float(scaled[index]), fmt)
    return codes


@cache
def _first_of_each_code(fmt: Format) -> Values:
    """For codes 1 to the maximum's: the least FP32 magnitude that the reference encodes to it or a larger one."""
    return np.array([_bisected(code, fmt) for code in range(1, fmt.max_code + 1)], dtype=np.uint32).view(np.float32)


def _bisected(code: int, fmt: Format) -> int:
    below, reached = 0, 0x7F7F_FFFF  # bit patterns of 0, and of FP32's maximum, which saturates
    while reached - below > 1:
        middle = (below + reached) // 2
        if encode(float(np.uint32(middle).view(np.float32)), fmt) >= code:
            reached = middle
        else:
            below = middle
    return reached


def _groups(granularity: Granularity, shape: tuple[int, ...]) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """Which scale each element has, counted row by row; and the scale's shape."""
    rows, columns = shape
    if isinstance(granularity, PerTensor):
        return np.zeros(shape, dtype=np.int64), ()
    high, wide = (granularity.rows, granularity.columns) if isinstance(granularity, PerBlock) else (1, columns or 1)
    across = math.ceil(columns / wide) if isinstance(granularity, PerBlock) else 1
    index = np.arange(rows)[:, None] // high * across + np.arange(columns)[None, :] // wide
    return index, (math.ceil(rows / high), across)


def _amaxes(values: Values, group: NDArray[np.int64], shape: tuple[int, ...]) -> Values:
    found = np.zeros(math.prod(shape), dtype=np.float32)
    np.maximum.at(found, group.ravel(), np.where(np.isfinite(values), np.abs(values), 0).ravel())
    return found


def _scales(amaxes: Values, row: Operand) -> tuple[Values, Values]:
    """Encode and decode scale of every group; the formula is asked once for each different one."""
    options = {"rounding": str(row.rounding), "amax_floor": row.amax_floor, "margin": row.margin}
    encodes = _each(lambda amax: encode_scale(amax, row.fmt.max, **options), amaxes)  # type: ignore[arg-type]
    return encodes, _each(decode_scale, encodes)


def _each(function: Callable[[float], float], values: Values) -> Values:
    unique, inverse = np.unique(values, return_inverse=True)
    return np.array([function(float(value)) for value in unique], dtype=np.float32)[inverse]

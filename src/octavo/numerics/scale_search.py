"""A scale of each vector, searched for: of sixteen, the one whose codes are nearest to the vector.

A code's error depends on where its number falls between two neighbours of E4M3's grid, and the scale moves all numbers
of a vector along it. A key or value has few large numbers, and there is a scale that puts just those close to the grid.
Tried are the scales of one binade, from the smallest power of two p that keeps the vector within 448:

    scale = p · n / 16    of n = 16 … 31 the one with the least    n² · Σ ⌊(y − r(y))²⌋    y = |x| / p · fp32(1024 / n)

where r rounds to the format's 4 bits of significand; the first of equals. In a text of 512 tokens the squared error of
SmolLM2-135M's keys was 0.49 of that with p alone, that of its values 0.63; eight scales left 0.57 and 0.70, thirty-two
0.45 and 0.59.

The errors are counted in integers, so that they add up to the same sum in any order, and every kernel finds the same
scale. What that leaves out is small: y is up to 64 · 448, and an error below 1 is none, half a step at 1/1,792 of the
largest number. There subnormal codes begin to matter, too: r knows none.
"""

import torch
from torch import Tensor

from octavo.formats import E4M3, FP32
from octavo.numerics.scaling import ScaleRounding, encode_scale_from_amax

__all__ = ["SMALLEST_AMAX", "searched_scale"]

STEPS = 16  # scales in a binade
SMALLEST_AMAX = E4M3.max * FP32.min_normal  # keeps scales normal numbers
DROPPED = FP32.mantissa_bits - E4M3.mantissa_bits
FINE = 64.0  # of 512 numbers, each 16 from the grid at most, the squares then stay below 2^30


def searched_scale(vectors: Tensor) -> Tensor:
    """The scale with the least squared error, of sixteen.

    Args:
        vectors: float32 [..., D], D up to 512.

    Returns:
        float32 [..., 1], each a normal BF16 number of five significant bits.

    Special values: NaN and ±Inf take no part; a vector without another number gets the smallest scale, 2^-126.

    Example:
        >>> searched_scale(torch.tensor([[448.0, 17.0], [0.5, 0.0]]))
        tensor([[1.7500],
                [0.0020]])
    """
    magnitudes = torch.where(vectors.isfinite(), vectors.abs(), 0.0)
    encode = encode_scale_from_amax(
        magnitudes.amax(-1, keepdim=True), E4M3, rounding=ScaleRounding.RCEIL, amax_floor=SMALLEST_AMAX
    )
    fitting = magnitudes * encode
    errors = torch.stack([_error(fitting, step) for step in range(STEPS, 2 * STEPS)])
    return (STEPS + errors.argmin(dim=0)) / STEPS / encode


def _error(fitting: Tensor, step: int) -> Tensor:
    """Squared errors of numbers that are divided by ``step`` / STEPS, int64 [..., 1]."""
    scaled = fitting * (FINE * STEPS / step)
    nearest = ((scaled.view(torch.int32) + (1 << (DROPPED - 1))) >> DROPPED << DROPPED).view(torch.float32)
    return (scaled - nearest).square().to(torch.int64).sum(-1, keepdim=True) * step**2

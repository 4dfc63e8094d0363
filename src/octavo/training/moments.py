"""AdamW's moments of matrices rounded to FP8 after each update, as if they were stored as codes.

    first moment    E4M3, a scale for each 128 elements of a row
    second moment   E5M2, likewise
    fp8-expanded    what is rounded is sign(m) · (|m| / max)^k, of which the result is max times the 1/k-th power, where

                        k = log(max / min of the format) / log(max / min of the block's magnitudes that are not 0)

                    gives the block the range of the format. Without the division |m|^k of small magnitudes, or of
                    magnitudes that differ little, whose k is large, is 0

The arithmetic is that of an optimizer that stores codes; the moments themselves stay in FP32, so no memory is saved.
Vectors (norms, biases) are not rounded. A second moment that becomes 0 makes its element's step as large as 1/``eps``
allows, which is what the expansion prevents.

Source: range expansion is that of COAT (arXiv 2410.19313), which has E4M3 for both moments.
"""

import math
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from octavo.formats import E4M3, E5M2, Format
from octavo.kernels import cast
from octavo.numerics import CastSpec, PerBlock

__all__ = ["Moments", "keep_in_fp8", "rounded_moment"]

BLOCK = PerBlock(1, 128)
FORMATS = {"exp_avg": E4M3, "exp_avg_sq": E5M2}


class Moments(StrEnum):
    """Precision of AdamW's moments."""

    FP32 = "fp32"
    FP8 = "fp8"
    FP8_EXPANDED = "fp8-expanded"


def keep_in_fp8(optimizer: torch.optim.Optimizer, moments: Moments) -> None:
    """Round the moments after every step of an AdamW from now on; nothing for FP32."""
    if moments != Moments.FP32:
        optimizer.register_step_post_hook(lambda stepped, *_: _round_all(stepped, moments))


@torch.no_grad()
def _round_all(optimizer: Any, moments: Moments) -> None:
    for state in optimizer.state.values():
        for name, fmt in FORMATS.items():
            moment = state[name].to_local() if isinstance(state[name], DTensor) else state[name]
            if moment.ndim >= 2:
                moment.copy_(rounded_moment(moment, fmt, expanded=moments == Moments.FP8_EXPANDED))


def rounded_moment(moment: Tensor, fmt: Format, *, expanded: bool) -> Tensor:
    """Values that the codes of a moment decode to.

    Args:
        moment: float32 [N, K].
        fmt: format of the codes.
        expanded: whether each block's range is expanded to the format's.

    Example:
        >>> rounded_moment(torch.tensor([[1.0, 1e-3, 1e-12]]), E5M2, expanded=False)
        tensor([[1.0000e+00, 9.7656e-04, 0.0000e+00]])
        >>> rounded_moment(torch.tensor([[1.0, 1e-3, 1e-12]]), E5M2, expanded=True)
        tensor([[1.0000e+00, 9.5903e-04, 1.0000e-12]])
    """
    spec = CastSpec(format=fmt, granularity=BLOCK)
    if not expanded:
        return cast(moment, spec).output.dequantize()
    magnitudes = moment.double().abs()
    largest = BLOCK.reduce_max(magnitudes)
    power, scale = (BLOCK.expand(each, moment.shape) for each in (_power(magnitudes, largest, fmt), largest))
    codes = cast(torch.where(scale > 0, magnitudes / scale, 0).pow(power).float(), spec)
    return (codes.output.dequantize().double().pow(1 / power) * scale * moment.sign()).float()


def _power(magnitudes: Tensor, largest: Tensor, fmt: Format) -> Tensor:
    """The exponent k of each block; 1 for a block of one magnitude."""
    smallest = 1 / BLOCK.reduce_max(torch.where(magnitudes == 0, 0, 1 / magnitudes))
    spread = (largest / smallest).log()
    return torch.where(spread > 0, math.log(fmt.max / (fmt.min_subnormal or fmt.min_normal)) / spread, 1.0)

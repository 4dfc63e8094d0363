"""Histogram of a tensor's magnitudes, with the exact maximum.

A bin is a float32 rounded to six mantissa bits (to zero below 2^-133), so its index is an integer addition and a shift,
and 64 bins a binade cover every magnitude:

    bin = (bits(|x|) + 2^16) >> 17          value of a bin = float32(bin << 17)          |x| / value within 1 ± 2^-7

The last bin's value is replaced by amax, which exceeds the bin's other values by up to 2^-6. An FP8 step spans 8 bins
or more, and values with six mantissa bits are represented exactly. Counts are integers, so their sum does not depend on
the order. No range has to be known in advance, so every method needs only one pass. The 16,321 counts take 128 KiB a
layer for any amount of data.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.formats import FP32
from octavo.numerics.cast import check_float

__all__ = ["BINS", "MagnitudeCounts", "Magnitudes", "values_of_bins"]

MANTISSA_BITS = 6
SHIFT = FP32.mantissa_bits - MANTISSA_BITS
HALF = 1 << (SHIFT - 1)
_INFINITY = FP32.magnitude_mask & ~((1 << FP32.mantissa_bits) - 1)  # bit pattern
BINS = (_INFINITY >> SHIFT) + 1


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """The magnitudes of one or more tensors, in ascending order, bin by bin.

    Attributes:
        amax: the largest; 0 if there are none.
        values: [n] float64, one per nonempty bin; the last is ``amax``.
        counts: [n] int64, 1 or more.
        widths: [n] float64, width of each bin.
    """

    amax: float
    values: Tensor
    counts: Tensor
    widths: Tensor

    @property
    def energy(self) -> float:
        """Σ x²."""
        return float((self.counts * self.values.square()).sum())

    @property
    def total(self) -> int:
        """Number of magnitudes, including zeros."""
        return int(self.counts.sum())

    @property
    def rms(self) -> float:
        """Root mean square; 0 if there are none."""
        return float((self.energy / self.total) ** 0.5) if self.total else 0.0


class MagnitudeCounts:
    """Running histogram of the magnitudes of tensors.

    Args:
        device: device of the counts.

    Attributes:
        amax: float32 [], the largest magnitude so far; NaN or Inf once one has been counted.
        counts: [BINS] int64.

    Example:
        >>> counts = MagnitudeCounts()
        >>> counts.add(torch.tensor([0.0, -3.0, 1.5, 3.0]))
        >>> magnitudes = counts.magnitudes()
        >>> magnitudes.amax, magnitudes.values.tolist(), magnitudes.counts.tolist()
        (3.0, [0.0, 1.5, 3.0], [1, 1, 2])
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.amax = torch.zeros((), dtype=torch.float32, device=device)
        self.counts = torch.zeros(BINS, dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        """Count a tensor of any shape and float dtype (float64 is cast to float32).

        After NaN or ±Inf ``amax`` stays NaN or Inf, and the finite elements of that tensor may not be counted.
        """
        check_float(x, "the tensor to count")
        if not x.numel():
            return
        x = x.detach().float()
        low, high = x.aminmax()
        amax = torch.maximum(-low, high).abs().to(self.amax.device)  # NaN propagates
        self.amax = torch.maximum(self.amax, amax)
        if not bool(amax.isfinite()):
            return
        bins = x.abs().view(torch.int32).add_(HALF).bitwise_right_shift_(SHIFT)
        self.counts += torch.bincount(bins.flatten(), minlength=BINS).to(self.counts.device)

    def merge(self, other: "MagnitudeCounts") -> None:
        """Add the counts of another histogram."""
        self.amax = torch.maximum(self.amax, other.amax)
        self.counts += other.counts

    def magnitudes(self) -> Magnitudes:
        """Magnitudes counted so far, on the CPU."""
        counts, amax = self.counts.cpu(), float(self.amax)
        bins = counts.nonzero().flatten()
        values, widths = values_of_bins(bins), _widths_of_bins(bins)
        if len(values):
            values[-1] = amax  # the only magnitude known exactly
        return Magnitudes(amax, values, counts[bins], widths)


def values_of_bins(bins: Tensor) -> Tensor:
    """Value of each bin, float64; the bin that reaches infinity has float32's maximum."""
    values = (bins.int() << SHIFT).view(torch.float32).double()
    return values.clamp(max=FP32.max)


def _widths_of_bins(bins: Tensor) -> Tensor:
    edges = (bins.int() << SHIFT)[:, None] + torch.tensor([-HALF, HALF], dtype=torch.int32)
    low, high = edges.clamp(0, _INFINITY).view(torch.float32).double().clamp(max=FP32.max).unbind(1)
    return high - low

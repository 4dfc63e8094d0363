"""What calibration keeps of a tensor: its largest magnitude, exactly, and a histogram of all of them.

A bin is a float32 rounded to six mantissa bits (below 2^-133, to zero), so its number is found by an integer addition
and a shift, and 64 bins a binade cover every magnitude there is:

    bin = (bits(|x|) + 2^16) >> 17          value of a bin = float32(bin << 17)          |x| / value within 1 ± 2^-7

The last bin's value is amax, by up to 2^-6 more than what else is in that bin. An FP8 step holds 8 bins or more, and a
tensor whose values have six mantissa bits is kept exactly. Counts are integers: their sum does not depend on the order.
No range has to be known before, so every method needs one pass only. 16,321 counts take 128 KiB a layer, however much
passes through it.
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
_INFINITY = FP32.magnitude_mask & ~((1 << FP32.mantissa_bits) - 1)  # its bits
BINS = (_INFINITY >> SHIFT) + 1


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """The magnitudes of one or more tensors, in ascending order, bin by bin.

    Attributes:
        amax: the largest; 0 where there are none.
        values: [n] float64, one a bin that holds any; the last is ``amax``.
        counts: [n] int64, 1 or more.
        widths: [n] float64, of the bins.
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
        """How many magnitudes there are, zeros among them."""
        return int(self.counts.sum())

    @property
    def rms(self) -> float:
        """Root of the mean square; 0 where there are none."""
        return float((self.energy / self.total) ** 0.5) if self.total else 0.0


class MagnitudeCounts:
    """Gathers the magnitudes of the tensors that it is given.

    Args:
        device: where to keep the counts.

    Attributes:
        amax: float32 [], the largest magnitude so far; NaN or Inf once there was one.
        counts: [BINS] int64.

    Example:
        >>> seen = MagnitudeCounts()
        >>> seen.add(torch.tensor([0.0, -3.0, 1.5, 3.0]))
        >>> found = seen.magnitudes()
        >>> found.amax, found.values.tolist(), found.counts.tolist()
        (3.0, [0.0, 1.5, 3.0], [1, 1, 2])
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.amax = torch.zeros((), dtype=torch.float32, device=device)
        self.counts = torch.zeros(BINS, dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        """Count a tensor of any shape and float dtype (float64 is taken as float32); nothing of it is kept.

        Where it holds NaN or ±Inf, ``amax`` says so from then on, and its finite elements may not be counted.
        """
        check_float(x, "the tensor to count")
        if not x.numel():
            return
        x = x.detach().float()
        low, high = x.aminmax()
        amax = torch.maximum(-low, high).abs().to(self.amax.device)  # of NaN it is NaN
        self.amax = torch.maximum(self.amax, amax)
        if not bool(amax.isfinite()):
            return
        bins = x.abs().view(torch.int32).add_(HALF).bitwise_right_shift_(SHIFT)
        self.counts += torch.bincount(bins.flatten(), minlength=BINS).to(self.counts.device)

    def merge(self, other: "MagnitudeCounts") -> None:
        """Add what another has counted."""
        self.amax = torch.maximum(self.amax, other.amax)
        self.counts += other.counts

    def magnitudes(self) -> Magnitudes:
        """What was counted so far, on the CPU."""
        counts, amax = self.counts.cpu(), float(self.amax)
        bins = counts.nonzero().flatten()
        values, widths = values_of_bins(bins), _widths_of_bins(bins)
        if len(values):
            values[-1] = amax  # the one magnitude that is known to the last bit
        return Magnitudes(amax, values, counts[bins], widths)


def values_of_bins(bins: Tensor) -> Tensor:
    """The value that stands for each bin, float64; float32's largest for the one that reaches infinity."""
    values = (bins.int() << SHIFT).view(torch.float32).double()
    return values.clamp(max=FP32.max)


def _widths_of_bins(bins: Tensor) -> Tensor:
    edges = (bins.int() << SHIFT)[:, None] + torch.tensor([-HALF, HALF], dtype=torch.int32)
    low, high = edges.clamp(0, _INFINITY).view(torch.float32).double().clamp(max=FP32.max).unbind(1)
    return high - low

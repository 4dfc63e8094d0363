"""Selection of a tensor's FP8 range, its amax, from the magnitudes observed in calibration.

| method       | range                                                                                               |
|--------------|-----------------------------------------------------------------------------------------------------|
| `max`        | the largest magnitude, without clipping                                                             |
| `percentile` | a percentile of the magnitudes                                                                      |
| `mse`        | the candidate with the least squared error Σ (x - decoded x)²                                       |
| `entropy`    | the candidate whose codes' distribution has the least KL divergence from the tensor's               |

Candidates are amax · 2^(-i/16) for i = 0 … 64: sixteen per binade over four binades. Decoded values come from the real
FP8 cast, not from a uniform grid, so clipping rarely helps: FP8's step size shrinks with the value, and a smaller range
improves a small value only by lifting it out of the subnormals, 13 binades below amax. With INT8, for which these
methods were designed, halving the range halves every step.

`entropy` follows TensorRT's INT8 calibration. P is the distribution of magnitudes over the bins, with everything beyond
the range moved into its last bin; Q spreads the elements of each FP8 level (127 magnitudes, 253 signed values) evenly
over the level's bins. Exact zeros have their own code and are excluded.
Source: Migacz, "8-bit Inference with TensorRT", GTC 2017.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.formats import Format
from octavo.kernels import quantize
from octavo.numerics import PerRow, ScaleRounding, scale_from_amax
from octavo.numerics.cast_spec import check_member
from octavo.quantization.calibration.magnitude_histogram import Magnitudes

__all__ = ["PERCENTILE", "Method", "RangeRule", "candidates", "decoded", "scale_from_magnitudes"]

BINADES, STEPS = 4, 16
PERCENTILE = 99.99  # the default


class Method(StrEnum):
    """Range selection for an input."""

    MAX = "max"
    PERCENTILE = "percentile"
    MSE = "mse"
    ENTROPY = "entropy"


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRule:
    """Method of range selection and its settings.

    Attributes:
        method: see the module's table.
        percentile: for the method `percentile`: above 0, at most 100.
        power_of_two: round each scale up to a power of two.

    Raises:
        ConfigError: an unknown method, or a percentile out of range.
    """

    method: Method = Method.MAX
    percentile: float = PERCENTILE
    power_of_two: bool = False

    def __post_init__(self) -> None:
        check_member("method", self.method, tuple(Method))
        if not 0 < self.percentile <= 100:
            raise ConfigError(f"percentile must be above 0 and at most 100, not {self.percentile!r}")

    @property
    def rounding(self) -> ScaleRounding:
        """Rounding of the scales."""
        return ScaleRounding.RCEIL if self.power_of_two else ScaleRounding.FP32


def candidates(amax: Tensor, binades: int = BINADES) -> Tensor:
    """Candidate amaxes, the largest first: float32 [16 · binades + 1, *amax.shape].

    Example:
        >>> candidates(torch.tensor(448.0), binades=1)[[0, 8, 16]]
        tensor([448.0000, 316.7838, 224.0000])
    """
    steps = torch.arange(STEPS * binades + 1, dtype=torch.float64, device=amax.device)
    factors = torch.exp2(-steps / STEPS)
    return (amax.double() * factors.view(-1, *[1] * amax.ndim)).float()


def scale_from_magnitudes(magnitudes: Magnitudes, rule: RangeRule, fmt: Format) -> Tensor:
    """Decode scale for a tensor of these magnitudes: float32 []; 1 if all are zero.

    Example:
        >>> from octavo.formats import E4M3
        >>> from octavo.quantization.calibration.magnitude_histogram import MagnitudeCounts
        >>> counts = MagnitudeCounts()
        >>> counts.add(torch.tensor([1.0, -896.0]))
        >>> scale_from_magnitudes(counts.magnitudes(), RangeRule(), E4M3)
        tensor(2.)
    """
    if not magnitudes.amax:
        return torch.ones(())
    if rule.method is Method.PERCENTILE:
        return scale_from_amax(torch.tensor(_percentile(magnitudes, rule.percentile)), fmt, rounding=rule.rounding)
    if rule.method is Method.MAX:
        return scale_from_amax(torch.tensor(magnitudes.amax), fmt, rounding=rule.rounding)
    ranges = candidates(torch.tensor(magnitudes.amax))
    scales = scale_from_amax(ranges, fmt, rounding=rule.rounding)
    decoded_values = decoded(magnitudes.values, scales, fmt)
    losses = (
        _squared_errors(magnitudes, decoded_values)
        if rule.method is Method.MSE
        else _divergences(magnitudes, ranges, decoded_values)
    )
    return scales[losses.argmin()]  # argmin takes the first of equals, which clips least


def decoded(values: Tensor, scales: Tensor, fmt: Format) -> Tensor:
    """Quantize and dequantize values [n] under each scale [c]: float64 [c, n]."""
    rows = values.float().expand(len(scales), -1).contiguous()
    return quantize(rows, fmt, granularity=PerRow(), scale=scales[:, None]).dequantize().double()


def _percentile(magnitudes: Magnitudes, percentile: float) -> float:
    """Magnitude at the nearest rank; amax if that magnitude is zero."""
    rank = math.ceil(magnitudes.total * percentile / 100)
    value = float(magnitudes.values[int(torch.searchsorted(magnitudes.counts.cumsum(0), rank))])
    return value or magnitudes.amax


def _squared_errors(magnitudes: Magnitudes, decoded_values: Tensor) -> Tensor:
    """Σ (x - decoded x)² for each row of ``decoded_values`` [c, n]: float64 [c]."""
    return ((magnitudes.values - decoded_values).square() * magnitudes.counts).sum(1)


def _divergences(magnitudes: Magnitudes, ranges: Tensor, decoded_values: Tensor) -> Tensor:
    """KL(P ‖ Q) for each row of ``decoded_values`` [c, n], in nats: float64 [c]."""
    first = int(magnitudes.values[0] == 0)
    values, counts, widths = magnitudes.values[first:], magnitudes.counts[first:].double(), magnitudes.widths[first:]
    losses = []
    for limit, levels in zip(ranges.double(), decoded_values[:, first:], strict=True):
        inside = int(torch.searchsorted(values, limit, right=True))
        if not inside:  # every magnitude is out of range
            losses.append(torch.tensor(math.inf, dtype=torch.float64))
            continue
        of_level = levels[:inside].unique_consecutive(return_inverse=True)[1]
        mass, width = (
            torch.zeros(int(of_level[-1]) + 1, dtype=torch.float64).index_add_(0, of_level, part[:inside])
            for part in (counts, widths)
        )
        q = (mass / width)[of_level] * widths[:inside] / counts[:inside].sum()
        p = counts[:inside] / counts.sum()
        p[-1] += counts[inside:].sum() / counts.sum()
        losses.append((p * (p / q).log()).sum())
    return torch.stack(losses)

"""How far a tensor's FP8 range should reach: its amax, from the magnitudes that calibration has seen.

| method       | range                                                                                               |
|--------------|-----------------------------------------------------------------------------------------------------|
| `max`        | the largest magnitude: nothing is clipped                                                           |
| `percentile` | the magnitude that a given share of the elements does not exceed                                    |
| `mse`        | of ``CANDIDATES``, the one whose codes have the least Σ (x - decoded x)²                            |
| `entropy`    | of ``CANDIDATES``, the one whose codes' distribution has the least KL divergence from the tensor's  |

Candidates are amax · 2^(-i/16) for i = 0 … 64: sixteen a binade, four binades. What they decode to is asked of the real
FP8 cast, not of a uniform grid, and that is why clipping seldom pays: FP8's steps shrink with its values, so a smaller
range makes no small value finer until it lifts it out of the subnormals, 13 binades below amax. For INT8, where these
methods come from, every halving of the range halves all steps.

`entropy` compares, as TensorRT's INT8 calibration does, P, the distribution of magnitudes over the bins with all that
lies beyond the range moved into the range's last bin, with Q, in which the elements of each FP8 level (127 magnitudes,
253 values with their signs) are spread evenly over the level's bins. Exact zeros have a code of their own and take no
part. Source: Migacz, "8-bit Inference with TensorRT", GTC 2017.
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
from octavo.quantization.calibration.magnitudes import Magnitudes

__all__ = ["PERCENTILE", "Method", "RangeRule", "candidates", "chosen_scale", "decoded"]

BINADES, STEPS = 4, 16
PERCENTILE = 99.99  # unless another is asked for


class Method(StrEnum):
    """How the range of an input is chosen."""

    MAX = "max"
    PERCENTILE = "percentile"
    MSE = "mse"
    ENTROPY = "entropy"


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRule:
    """A method and its settings.

    Attributes:
        method: see the module's table.
        percentile: of `percentile`: above 0, at most 100.
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
        """Which numbers scales may be."""
        return ScaleRounding.RCEIL if self.power_of_two else ScaleRounding.FP32


def candidates(amax: Tensor, binades: int = BINADES) -> Tensor:
    """Amaxes to try, the largest first: float32 [16 · binades + 1, *amax.shape].

    Example:
        >>> candidates(torch.tensor(448.0), binades=1)[[0, 8, 16]]
        tensor([448.0000, 316.7838, 224.0000])
    """
    steps = torch.arange(STEPS * binades + 1, dtype=torch.float64, device=amax.device)
    factors = torch.exp2(-steps / STEPS)
    return (amax.double() * factors.view(-1, *[1] * amax.ndim)).float()


def chosen_scale(seen: Magnitudes, rule: RangeRule, fmt: Format) -> Tensor:
    """The decode scale of a tensor of these magnitudes: float32 []; 1 where all of them are zero.

    Example:
        >>> from octavo.formats import E4M3
        >>> from octavo.quantization.calibration.magnitudes import MagnitudeCounts
        >>> counts = MagnitudeCounts()
        >>> counts.add(torch.tensor([1.0, -896.0]))
        >>> chosen_scale(counts.magnitudes(), RangeRule(), E4M3)
        tensor(2.)
    """
    if not seen.amax:
        return torch.ones(())
    if rule.method is Method.PERCENTILE:
        return scale_from_amax(torch.tensor(_percentile(seen, rule.percentile)), fmt, rounding=rule.rounding)
    if rule.method is Method.MAX:
        return scale_from_amax(torch.tensor(seen.amax), fmt, rounding=rule.rounding)
    ranges = candidates(torch.tensor(seen.amax))
    scales = scale_from_amax(ranges, fmt, rounding=rule.rounding)
    found = decoded(seen.values, scales, fmt)
    losses = _squared_errors(seen, found) if rule.method is Method.MSE else _divergences(seen, ranges, found)
    return scales[losses.argmin()]  # of equals the first, which clips least


def decoded(values: Tensor, scales: Tensor, fmt: Format) -> Tensor:
    """What values [n] become under each scale [c]: float64 [c, n]."""
    rows = values.float().expand(len(scales), -1).contiguous()
    return quantize(rows, fmt, granularity=PerRow(), scale=scales[:, None]).dequantize().double()


def _percentile(seen: Magnitudes, percentile: float) -> float:
    """The magnitude at the nearest rank; amax if all that lies below is zero."""
    rank = math.ceil(seen.total * percentile / 100)
    value = float(seen.values[int(torch.searchsorted(seen.counts.cumsum(0), rank))])
    return value or seen.amax


def _squared_errors(seen: Magnitudes, found: Tensor) -> Tensor:
    """Σ (x - decoded x)² of each row of ``found`` [c, n]: float64 [c]."""
    return ((seen.values - found).square() * seen.counts).sum(1)


def _divergences(seen: Magnitudes, ranges: Tensor, found: Tensor) -> Tensor:
    """KL(P ‖ Q) of each row of ``found`` [c, n], in nats: float64 [c]."""
    first = int(seen.values[0] == 0)
    values, counts, widths = seen.values[first:], seen.counts[first:].double(), seen.widths[first:]
    losses = []
    for limit, levels in zip(ranges.double(), found[:, first:], strict=True):
        inside = int(torch.searchsorted(values, limit, right=True))
        if not inside:  # every magnitude lies beyond
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

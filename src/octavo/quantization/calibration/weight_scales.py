"""Scales of weights, per tensor, per row or per 128x128 block.

`max` is the recipe's own cast: each group's largest magnitude maps to the format's maximum. `mse` tries the ranges
amax · 2^(-i/16) over one binade for each group and selects the one with the least squared error. A cast of the weight
does not reproduce such a scale, so the layer has to store the codes.
"""

from enum import StrEnum

import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.errors import ConfigError
from octavo.kernels import quantize
from octavo.numerics import Granularity, PerBlock, PerRow, QuantizedTensor, amax, scale_from_amax
from octavo.quantization.calibration.ranges import candidates
from octavo.recipes import CastSpec

__all__ = ["WeightMethod", "quantized_weight"]


class WeightMethod(StrEnum):
    """Selection of weight scales."""

    MAX = "max"
    MSE = "mse"


@torch.no_grad()
def quantized_weight(weight: Tensor, spec: CastSpec, method: WeightMethod) -> QuantizedTensor:
    """Quantize a weight.

    Args:
        weight: [N, K], in high precision.
        spec: the format, granularity and rounding.
        method: selection of the scales.

    Raises:
        ConfigError: the weight contains NaN or ±Inf.

    Example:
        >>> from octavo import recipes
        >>> spec = recipes.get("static", weight_granularity="row").output.b
        >>> quantized_weight(torch.ones(2, 8) * 448, spec, WeightMethod.MAX).scale
        tensor([[1.],
                [1.]])
    """
    weight = weight.detach().float()
    if not weight.isfinite().all():
        raise ConfigError("the weight contains NaN or infinity")
    largest = amax(weight, spec.granularity)
    best = _quantized(weight, spec, largest)
    if method is WeightMethod.MAX:
        return best
    scale, least = best.scale, _squared_error(weight, best)
    for smaller in candidates(largest, binades=1)[1:]:
        candidate = _quantized(weight, spec, smaller)
        error = _squared_error(weight, candidate)
        scale = torch.where(error < least, candidate.scale, scale)
        least = torch.minimum(error, least)
    return quantize(weight, spec.format, granularity=spec.granularity, scale=scale)


def _quantized(weight: Tensor, spec: CastSpec, ranges: Tensor) -> QuantizedTensor:
    scale = scale_from_amax(ranges, spec.format, rounding=spec.scale_rounding, amax_floor=spec.amax_floor)
    return quantize(weight, spec.format, granularity=spec.granularity, scale=scale)


def _squared_error(weight: Tensor, q: QuantizedTensor) -> Tensor:
    """Σ (w - decoded w)² of each scaling group: float64, in the scale's shape."""
    return sums_over_groups((weight.double() - q.dequantize().double()).square(), q.granularity)


def sums_over_groups(values: Tensor, granularity: Granularity) -> Tensor:
    """Sum of each scaling group of a matrix, in the scale's shape."""
    if isinstance(granularity, PerRow):
        return values.sum(-1, keepdim=True)
    if not isinstance(granularity, PerBlock):
        return values.sum()
    rows, columns = granularity.scale_shape(values.shape)
    padding = (0, columns * granularity.columns - values.shape[1], 0, rows * granularity.rows - values.shape[0])
    return pad(values, padding).view(rows, granularity.rows, columns, granularity.columns).sum((1, 3))

"""Error metrics of a quantized tensor against its original.

One number is not enough. The signal-to-noise ratio (SQNR) is blind to underflow: a log-normal gradient showed 31.7 dB
with 62 % of its nonzeros flushed to zero. So the flushed count and energy, and the saturated fraction, stand beside
it. Only elements whose original is finite are counted.
"""

import torch
from torch import Tensor

from octavo.numerics.quantized import QuantizedTensor

__all__ = [
    "flushed_energy",
    "nonfinite_count",
    "saturation_amax",
    "saturation_fraction",
    "saturation_limit",
    "sqnr_db",
    "underflow_fraction",
]


def sqnr_db(original: Tensor, approximation: Tensor) -> float:
    """Signal to quantization noise, 10·log10(Σ x² / Σ (x - y)²), in dB; summed in float64.

    Returns:
        +inf for identical tensors, -inf where the signal is zero and the noise is not.

    Example:
        >>> round(sqnr_db(torch.tensor([1.0, 2.0]), torch.tensor([1.1, 2.0])), 1)
        27.0
    """
    finite = original.isfinite()
    signal = original[finite].double()
    noise = (signal - approximation[finite].double()).square().sum()
    if noise == 0:
        return float("inf")
    return float(10 * torch.log10(signal.square().sum() / noise))


def underflow_fraction(original: Tensor, q: QuantizedTensor) -> float:
    """Share of the original's nonzeros whose code is zero.

    Example:
        >>> from octavo.formats import E4M3
        >>> from octavo.numerics.quantized import quantize
        >>> x = torch.tensor([448.0, 1e-4, 0.0, 1.0])
        >>> round(underflow_fraction(x, quantize(x, E4M3)), 3)
        0.333
    """
    nonzero = original.isfinite() & (original != 0)
    return _fraction(_is_zero(q) & nonzero, nonzero)


def flushed_energy(original: Tensor, q: QuantizedTensor) -> float:
    """Share of Σ x² that sits in nonzeros whose code is zero.

    Example:
        >>> from octavo.formats import E4M3
        >>> from octavo.numerics.quantized import quantize
        >>> x = torch.tensor([3.0, 4.0])
        >>> flushed_energy(x, quantize(x, E4M3, scale=torch.tensor(4096.0)))
        1.0
    """
    energy = torch.where(original.isfinite(), original.double(), 0.0).square()
    total = float(energy.sum())
    return float(energy[_is_zero(q)].sum()) / total if total else 0.0


def saturation_fraction(original: Tensor, q: QuantizedTensor) -> float:
    """Share of elements that lay beyond the largest value the scale provides for and were cut to it.

    An element that merely rounds to the maximum is not saturated.

    Example:
        >>> from octavo.formats import E4M3
        >>> from octavo.numerics.quantized import quantize
        >>> x = torch.tensor([1.0, 500.0])
        >>> saturation_fraction(x, quantize(x, E4M3, scale=torch.tensor(1.0)))
        0.5
    """
    finite = original.isfinite()
    return _fraction((original.double().abs() > saturation_limit(q)) & finite, finite)


def saturation_limit(q: QuantizedTensor) -> Tensor:
    """Larger magnitudes saturate: float64, in a shape that broadcasts against the tensor's.

    Example:
        >>> from octavo.formats import E4M3
        >>> from octavo.numerics.quantized import quantize
        >>> saturation_limit(quantize(torch.ones(2), E4M3, scale=torch.tensor(1.0))).item()
        464.0
    """
    return q.granularity.expand(saturation_amax(q), q.shape)


def saturation_amax(q: QuantizedTensor) -> Tensor:
    """The same for each scaling group: float64, in the scale's shape."""
    fmt = q.format
    half_step = (fmt.max - fmt.magnitude(fmt.max_code - 1)) / 2
    return q.fp32_scale.double() * (fmt.max + half_step)


def nonfinite_count(x: Tensor) -> int:
    """Number of NaN and ±Inf elements; taken before a cast, since a saturating one hides them.

    Example:
        >>> nonfinite_count(torch.tensor([1.0, float("nan"), float("-inf")]))
        2
    """
    return int((~x.isfinite()).sum())


def _is_zero(q: QuantizedTensor) -> Tensor:
    return q.data.float() == 0


def _fraction(part: Tensor, whole: Tensor) -> float:
    count = int(whole.sum())
    return int(part.sum()) / count if count else 0.0

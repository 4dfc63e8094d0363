"""From a tensor's largest magnitude (amax) to its scale.

    encode_scale = fp32( fp64(maximum) · 2^-margin / fp64(max(amax, amax_floor)) )      multiplies before the cast
    scale        = fp32( 1 / encode_scale )                                             stored; hp ≈ data · scale

| amax                        | encode_scale                                                                          |
|-----------------------------|---------------------------------------------------------------------------------------|
| 0                           | that of ``amax_floor``: codes are 0 and decode to exact 0, never NaN                  |
| so small that it overflows  | the largest finite float32                                                            |
| a margin that underflows it | the smallest normal float32, whose reciprocal is still finite                         |
| Inf, NaN elements           | do not take part: the amax is that of the finite elements                             |

With ``power_of_two`` the encode scale's mantissa bits are cleared: the exact floor to a power of two. (The usual
``exp2(floor(log2(s)))`` rounds up just below powers of two.) The division is FP64 and rounded once; this is bit
for bit what torchao's tensorwise recipe computes. Dividing by ``amax / maximum`` instead would change codes of one
bfloat16 tensor in fifty, up to 2 % of them.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.formats import Format
from octavo.numerics.cast import can_be_asked, check_float, narrowed
from octavo.numerics.granularity import Granularity, PerTensor, granularity_or_default

__all__ = [
    "AMAX_FLOOR",
    "Measurement",
    "amax",
    "encode_scale_from_amax",
    "measure",
    "power_of_two_floor",
    "scale_from_amax",
]

AMAX_FLOOR = 1e-12  # torchao's EPS; below it a tensor is treated as that small


def amax(x: Tensor, granularity: Granularity | None = None) -> Tensor:
    """Largest finite magnitude of every scaling group, float32.

    Args:
        x: float16, bfloat16, float32 or float64 (taken as float32: what lies beyond its range is infinite).
        granularity: the groups; None is one for the whole tensor.

    Returns:
        float32 of shape ``granularity.scale_shape(x.shape)``; 0 for a group that is empty or holds no finite element.

    Raises:
        ConfigError: ``x`` is not floating point, or has too few dimensions for the granularity.

    Example:
        >>> amax(torch.tensor([1.0, -3.0, float("inf")]))
        tensor(3.)
    """
    check_float(x, "the tensor to measure")
    return measure(x.detach(), granularity_or_default(granularity)).amax


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one look at a tensor found.

    Attributes:
        amax: largest finite magnitude of every scaling group, float32.
        nonfinite: number of NaN and ±Inf elements, int64 []; None where the tensor is known to have none.
    """

    amax: Tensor
    nonfinite: Tensor | None


def measure(x: Tensor, granularity: Granularity) -> Measurement:
    """Amax and non-finite count without argument checks; one pass where every element is finite.

    A maximum lets NaN and Inf through, so a finite one proves the tensor finite, where its values can be asked for.
    """
    x = narrowed(x)
    if can_be_asked(x):
        plain = _plain_amax(x, granularity)
        if math.isfinite(plain.sum().item()):
            return Measurement(plain, None)
    finite = x.isfinite()
    amax = granularity.reduce_max(torch.where(finite, x.abs(), 0)).float()
    return Measurement(amax, (~finite).sum())


def _plain_amax(x: Tensor, granularity: Granularity) -> Tensor:
    if isinstance(granularity, PerTensor) and x.numel():
        low, high = x.aminmax()  # half the time of abs().amax(): no intermediate
        return torch.maximum(high.float(), -low.float()).abs()
    return granularity.reduce_max(x.abs()).float()


def encode_scale_from_amax(
    amax: Tensor, fmt: Format, *, power_of_two: bool = False, amax_floor: float = AMAX_FLOOR, margin: int = 0
) -> Tensor:
    """The multiplier that brings ``amax`` to the format's maximum; float32, finite, positive.

    Args:
        amax: non-negative and finite float32 of any shape, as :func:`amax` gives it; a NaN stays one.
        fmt: the format to fill.
        power_of_two: round the multiplier down to a power of two.
        amax_floor: smaller amaxes count as this.
        margin: binades to leave free above amax; 0 or more.

    Raises:
        ConfigError: ``margin`` or ``amax_floor`` is negative.

    Example:
        >>> from octavo.formats import E4M3
        >>> encode_scale_from_amax(torch.tensor([448.0, 0.5, 0.0]), E4M3, amax_floor=0.0)
        tensor([1.0000e+00, 8.9600e+02, 3.4028e+38])
    """
    if margin < 0 or margin % 1:
        raise ConfigError(f"margin must be 0 or more binades, not {margin}")
    if not amax_floor >= 0:
        raise ConfigError(f"amax_floor must be 0 or more, not {amax_floor}")
    target = fmt.max * 2.0**-margin
    quotient = target / amax.double().clamp(min=max(amax_floor, torch.finfo(torch.float64).tiny))  # never 0 / 0
    encode_scale = quotient.clamp(torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max).float()
    return power_of_two_floor(encode_scale) if power_of_two else encode_scale


def scale_from_amax(
    amax: Tensor, fmt: Format, *, power_of_two: bool = False, amax_floor: float = AMAX_FLOOR, margin: int = 0
) -> Tensor:
    """The scale that is stored: the reciprocal of :func:`encode_scale_from_amax`, float32.

    Example:
        >>> from octavo.formats import E4M3
        >>> scale_from_amax(torch.tensor(896.0), E4M3)
        tensor(2.)
    """
    return encode_scale_from_amax(
        amax, fmt, power_of_two=power_of_two, amax_floor=amax_floor, margin=margin
    ).reciprocal()


def power_of_two_floor(positive: Tensor) -> Tensor:
    """Largest power of two that is not above a positive normal float32, by clearing its mantissa bits.

    Example:
        >>> power_of_two_floor(torch.tensor([0.99999994, 1.0, 448.0]))
        tensor([  0.5000,   1.0000, 256.0000])
    """
    return (positive.view(torch.int32) & 0x7F80_0000).view(torch.float32)

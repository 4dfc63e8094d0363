"""From a tensor's largest magnitude (amax) to its scale.

    encode_scale = fp32( fp64(maximum) · 2^-margin / fp64(max(amax, amax_floor)) )      multiplies before the cast
    scale        = fp32( 1 / encode_scale )                                             stored; hp ≈ data · scale

| amax                        | encode_scale                                                                          |
|-----------------------------|---------------------------------------------------------------------------------------|
| 0                           | that of ``amax_floor``: codes are 0 and decode to exact 0, never NaN                  |
| so small that it overflows  | the largest finite float32; its reciprocal is a subnormal number with 22 digits       |
| a margin that underflows it | the smallest normal float32, whose reciprocal is still finite                         |
| Inf, NaN elements           | do not take part: the amax is that of the finite elements                             |

By default there is no floor: the limit of the encode scale is one, maximum / FLT_MAX, and the smallest under which the
quotient is finite. A larger floor is for equality with libraries that have one.

The division is FP64 and rounded once; with an ``amax_floor`` of 1e-12, its EPS, this is bit for bit what torchao's
tensorwise recipe computes, and without one from that amax on. Dividing by ``amax / maximum`` instead would change codes
of one bfloat16 tensor in fifty, up to 2 % of them.

A scale may be a power of two, by bits and not by logarithms (``exp2(floor(log2(s)))`` rounds up just below powers of
two). Three rules are in use, for the decode scale of a block with largest magnitude amax:

| rule    | scale                                                          | saturates                                 |
|---------|----------------------------------------------------------------|-------------------------------------------|
| `rceil` | amax / maximum, up to a power of two                           | nothing                                   |
| `floor` | 2^(floor(log2 amax) - floor(log2 maximum))                     | amaxes above 1.75 (E4M3) times 2^n        |
| `even`  | as `floor`, of amax rounded to the format's mantissa bits      | fewer of them                             |

Such a scale fits in an E8M0 byte: 2^(byte - 127), 255 is NaN. Bytes are kept as uint8, which every compiler knows;
``.view(torch.float8_e8m0fnu)`` is free. Sources: OCP Microscaling Formats 1.0 §6.3 (`floor`);
NVIDIA, arXiv 2506.08027 (`rceil`: rounding down diverges in MXFP8 pre-training).
"""

import math
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.formats import E8M0, Format
from octavo.numerics.cast import check_float, check_member, is_eager_cpu, narrowed
from octavo.numerics.granularity import Granularity, PerTensor, granularity_or_default

__all__ = [
    "AMAX_FLOOR",
    "AmaxRecord",
    "Measurement",
    "ScaleRounding",
    "Scaling",
    "amax",
    "check_scale_options",
    "e8m0_from_scale",
    "encode_scale_from_amax",
    "measure",
    "power_of_two_floor",
    "scale_from_amax",
    "scale_from_e8m0",
    "smallest_scaled_amax",
]

# None but that of the encode scale's own limit. An integer: torch.compile(dynamic=True) makes symbols of floats, and
# fails where a layer is called twice.
AMAX_FLOOR = 0


class Scaling(StrEnum):
    """Source of a scale."""

    DYNAMIC = "dynamic"  # this tensor
    DELAYED = "delayed"  # finished steps
    STATIC = "static"  # calibration; the layer holds it


class ScaleRounding(StrEnum):
    """Rounding of a scale; the module's docstring gives the rules."""

    FP32 = "fp32"  # the nearest float32
    RCEIL = "rceil"
    FLOOR = "floor"
    EVEN = "even"


_ROUNDINGS = tuple(ScaleRounding)  # no graph traces how it is made


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


class Measurement(NamedTuple):
    """Amaxes and non-finite count of a tensor, from one pass.

    Attributes:
        amax: largest finite magnitude of every scaling group, float32.
        nonfinite: number of NaN and ±Inf elements, int64 []; None where the tensor is known to have none.
    """

    amax: Tensor
    nonfinite: Tensor | None


class AmaxRecord(NamedTuple):
    """Buffers that accumulate measurements in place; a None accumulates nothing.

    Attributes:
        amax: float32 [], raised to the largest amax; below 0 where nothing was measured.
        overflowed: bool [], set by NaN or ±Inf.
        nonfinite: int64 [], raised by the number of NaN and ±Inf elements.
    """

    amax: Tensor | None = None
    overflowed: Tensor | None = None
    nonfinite: Tensor | None = None

    @property
    def gathers(self) -> bool:
        """Return whether any buffer is set."""
        return not (self.amax is self.overflowed is self.nonfinite is None)

    def add(self, measurement: Measurement) -> None:
        """Accumulate the measurement of a non-empty tensor."""
        if self.amax is not None:
            self.amax.copy_(torch.maximum(self.amax, measurement.amax.amax()))
        if measurement.nonfinite is not None:
            if self.overflowed is not None:
                self.overflowed.logical_or_(measurement.nonfinite > 0)
            if self.nonfinite is not None:
                self.nonfinite.add_(measurement.nonfinite)


def measure(x: Tensor, granularity: Granularity) -> Measurement:
    """Amax and non-finite count without argument checks; one pass where every element is finite.

    A maximum lets NaN and Inf through, so a finite one proves the tensor finite, where its values can be asked for.
    """
    x = narrowed(x)
    if is_eager_cpu(x):
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
    amax: Tensor,
    fmt: Format,
    *,
    rounding: ScaleRounding = ScaleRounding.FP32,
    amax_floor: float = AMAX_FLOOR,
    margin: int = 0,
) -> Tensor:
    """The multiplier that brings ``amax`` to the format's maximum; float32, finite, positive.

    Args:
        amax: non-negative and finite float32 of any shape, as :func:`amax` gives it.
        fmt: the format to fill.
        rounding: which numbers the scale may be.
        amax_floor: smaller amaxes count as this; a floor above :func:`smallest_scaled_amax` costs range.
        margin: binades to leave free above amax; 0 or more.

    Raises:
        ConfigError: ``margin`` or ``amax_floor`` is negative, or ``rounding`` unknown.

    Example:
        >>> from octavo.formats import E4M3
        >>> encode_scale_from_amax(torch.tensor([448.0, 0.5, 0.0]), E4M3)
        tensor([1.0000e+00, 8.9600e+02, 3.4028e+38])
        >>> encode_scale_from_amax(torch.tensor(500.0), E4M3, rounding="rceil")  # 500 / 448, up to 2, and over
        tensor(0.5000)
        >>> encode_scale_from_amax(torch.tensor(500.0), E4M3, rounding="floor")  # 500 saturates
        tensor(1.)
    """
    if not torch.compiler.is_compiling():  # a graph with dynamic shapes cannot compare numbers it has made symbols of
        check_scale_options(rounding, amax_floor, margin)
    largest = amax.double().clamp(min=max(amax_floor, torch.finfo(torch.float64).tiny))  # never 0 / 0
    if rounding in (ScaleRounding.FLOOR, ScaleRounding.EVEN):
        return _encode_exponent(largest, fmt, margin, even=rounding == ScaleRounding.EVEN)
    quotient = fmt.max * 2.0**-margin / largest
    encode_scale = quotient.clamp(torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max).float()
    return power_of_two_floor(encode_scale) if rounding == ScaleRounding.RCEIL else encode_scale


def smallest_scaled_amax(fmt: Format, amax_floor: float = AMAX_FLOOR) -> float:
    """The smallest amax that a scale brings to the format's maximum; smaller ones share its scale.

    Example:
        >>> from octavo.formats import E4M3
        >>> smallest_scaled_amax(E4M3), smallest_scaled_amax(E4M3, 1e-12)
        (1.3165537513936807e-36, 1e-12)
    """
    return max(amax_floor, fmt.max / torch.finfo(torch.float32).max)


def check_scale_options(rounding: ScaleRounding, amax_floor: float, margin: int) -> None:
    """Raise ConfigError for a rounding, floor or margin that no scale is made with."""
    check_member("rounding", rounding, _ROUNDINGS)
    if margin < 0 or margin % 1:
        raise ConfigError(f"margin must be 0 or more binades, not {margin}")
    if not 0 <= amax_floor < math.inf:
        raise ConfigError(f"amax_floor must be 0 or more and finite, not {amax_floor}")


def _encode_exponent(largest: Tensor, fmt: Format, margin: int, *, even: bool) -> Tensor:
    """2^(floor(log2 maximum) - margin - floor(log2 largest)) of positive normal float64, by their exponent bits."""
    half = 1 << (51 - fmt.mantissa_bits) if even else 0  # what lies in the upper half of the last step carries
    exponent = ((largest.view(torch.int64) + half) >> 52) - 1023
    encode_exponent = (math.frexp(fmt.max)[1] - 1 - margin - exponent).clamp(-126, 127)
    return ((encode_exponent + 127) << 23).int().view(torch.float32)


def scale_from_amax(
    amax: Tensor,
    fmt: Format,
    *,
    rounding: ScaleRounding = ScaleRounding.FP32,
    amax_floor: float = AMAX_FLOOR,
    margin: int = 0,
) -> Tensor:
    """The scale that is stored: the reciprocal of :func:`encode_scale_from_amax`, float32.

    Example:
        >>> from octavo.formats import E4M3
        >>> scale_from_amax(torch.tensor(896.0), E4M3)
        tensor(2.)
    """
    return encode_scale_from_amax(amax, fmt, rounding=rounding, amax_floor=amax_floor, margin=margin).reciprocal()


def e8m0_from_scale(scale: Tensor) -> Tensor:
    """A power of two from 2^-127 to 2^127 as an E8M0 byte; the smallest is a float32 subnormal.

    Example:
        >>> e8m0_from_scale(torch.tensor([1.0, 2.0**-127]))
        tensor([127,   0], dtype=torch.uint8)
    """
    return (scale.view(torch.int32) >> 23).to(torch.uint8)


def scale_from_e8m0(codes: Tensor) -> Tensor:
    """E8M0 bytes as float32.

    Example:
        >>> scale_from_e8m0(torch.tensor([0, 127, 255], dtype=torch.uint8))
        tensor([5.8775e-39, 1.0000e+00,        nan])
    """
    if not torch.compiler.is_compiling():
        return codes.view(E8M0.torch_dtype).float()
    powers = (codes.int() << 23).view(torch.float32)  # by operations that every compiler knows
    smallest, nan_code = E8M0.min_normal, E8M0.nan_codes[0]
    return torch.where(codes == 0, smallest, torch.where(codes == nan_code, math.nan, powers))


def power_of_two_floor(positive: Tensor) -> Tensor:
    """Largest power of two that is not above a positive normal float32, by clearing its mantissa bits.

    Example:
        >>> power_of_two_floor(torch.tensor([0.99999994, 1.0, 448.0]))
        tensor([  0.5000,   1.0000, 256.0000])
    """
    return (positive.view(torch.int32) & 0x7F80_0000).view(torch.float32)

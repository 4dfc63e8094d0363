"""Cast of one tensor as another engine does it, bit for bit: each step that engines do differently is a field.

    amax   = largest magnitude of a group, over the elements that `amax_of` names, at least `amax_floor`
    scale  = amax and `limit` divided as `division` says, in FP64, FP32 or the tensor's dtype; at least `scale_floor`;
             rounded to a power of two where `power_of_two` says so; hp ≈ codes · scale
    codes  = x / scale or x · (1 / scale), rounded to FP32 or the tensor's dtype, within ±`limit`, to the nearest code

The only rounding to FP8 is that of :func:`octavo.numerics.cast_nearest`. What happens to a
group of zeros, or of numbers that are not finite, is a field too.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.formats import E4M3, E8M0, FP32, Format
from octavo.numerics import Granularity, Nonfinite, PerTensor, QuantizedTensor, Scaling, cast_nearest, measure
from octavo.numerics.quantized import stored_scale
from octavo.numerics.scaling import power_of_two_floor

__all__ = ["AmaxOf", "Application", "Division", "EngineCast", "PowerOfTwo", "Saturation", "quantize_as"]

_PER_TENSOR = PerTensor()


class AmaxOf(StrEnum):
    """Elements that take part in an amax."""

    ALL = "all, NaN and Inf included"
    NUMBERS = "all but NaN"
    FINITE = "the finite ones"


class Division(StrEnum):
    """Division that makes a scale; two of them make the encode scale, of which the stored scale is the reciprocal."""

    LIMIT_BY_AMAX = "limit / amax"
    LIMIT_BY_RECIPROCAL = "limit * (1 / amax)"
    AMAX_BY_LIMIT = "amax / limit"
    AMAX_BY_RECIPROCAL = "amax * (1 / limit)"


class PowerOfTwo(StrEnum):
    """Rounding of a scale to a power of two; by its bits, or by FP32 logarithms, which err next to powers of two."""

    NONE = "none"
    ENCODE_DOWN = "encode scale down, by bits"
    ENCODE_DOWN_BY_LOG2 = "encode scale down, by log2"
    SCALE_UP = "scale up, by bits"
    SCALE_UP_BY_LOG2 = "scale up, by log2"


ENCODE_DIVISIONS = (Division.LIMIT_BY_AMAX, Division.LIMIT_BY_RECIPROCAL)
ENCODE_ROUNDINGS = {  # and those of a scale that give the same power of two
    PowerOfTwo.ENCODE_DOWN: PowerOfTwo.SCALE_UP,
    PowerOfTwo.ENCODE_DOWN_BY_LOG2: PowerOfTwo.SCALE_UP_BY_LOG2,
}


class Application(StrEnum):
    """Operation between a number and its scale."""

    MULTIPLY = "x * (1 / scale)"
    DIVIDE = "x / scale"


class Saturation(StrEnum):
    """Codes of infinities and NaN; finite values beyond the limit become ±limit under all."""

    PROPAGATE = "Inf becomes NaN, NaN stays"
    SATURATE = "Inf becomes the limit, NaN stays"
    NAN_TO_LIMIT = "Inf and NaN become the limit"
    NAN_TO_MINUS_LIMIT = "Inf becomes the limit, NaN -limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCast:
    """Specification of an engine's cast; a dtype of None is that of the tensor to cast.

    Attributes:
        format: of the codes.
        granularity: which elements share a scale.
        scaling: from this tensor, from past steps, or from calibration.
        limit: magnitude that an amax is scaled to, and at which codes saturate; None is the format's maximum.
        amax_of: elements that take part in an amax.
        amax_floor: smaller amaxes count as this.
        division: of the scale.
        divided_in: dtype of that division.
        scale_floor: smaller scales count as this.
        power_of_two: rounding of the scale.
        scale_format: FP32, or E8M0 for one byte.
        zero_scale: scale of a group whose amax counts as zero; "epsilon" is that of the division's dtype, None leaves
            what the formula gives.
        zero_amax: amaxes up to this count as zero, and so does NaN; None: those whose scale comes out as 0.
        zero_encode: encode scale of such a group; None is the scale's reciprocal.
        infinite_encode: dtype whose largest number replaces an encode scale that overflows; "tensor" is that of the
            tensor, None leaves infinity.
        nonfinite_scale: scale of a group whose amax is not finite; None leaves what the formula gives.
        application: operation between a number and its scale.
        applied_in: dtype that the quotient or product is rounded to before the cast; it is computed in FP32.
        saturation: codes of infinities and NaN.
    """

    format: Format = E4M3
    granularity: Granularity = _PER_TENSOR
    scaling: Scaling = Scaling.DYNAMIC
    limit: float | None = None
    amax_of: AmaxOf = AmaxOf.ALL
    amax_floor: float = 0.0
    division: Division = Division.AMAX_BY_LIMIT
    divided_in: torch.dtype | None = torch.float32
    scale_floor: float = 0.0
    power_of_two: PowerOfTwo = PowerOfTwo.NONE
    scale_format: Format = FP32
    zero_scale: float | str | None = None
    zero_amax: float | None = 0.0
    zero_encode: float | None = None
    infinite_encode: torch.dtype | str | None = None
    nonfinite_scale: float | None = None
    application: Application = Application.MULTIPLY
    applied_in: torch.dtype | None = torch.float32
    saturation: Saturation = Saturation.SATURATE

    def __post_init__(self) -> None:
        if self.scale_format == E8M0 and self.power_of_two == PowerOfTwo.NONE:
            raise ConfigError("E8M0 holds powers of two; a cast with it needs power_of_two")
        if self.power_of_two in ENCODE_ROUNDINGS and self.division not in ENCODE_DIVISIONS:
            raise ConfigError(f"{self.power_of_two} rounds an encode scale, and {self.division} makes none")

    @property
    def largest(self) -> float:
        """The limit of the codes."""
        return self.format.max if self.limit is None else self.limit


def quantize_as(
    x: Tensor, cast: EngineCast, *, amax: Tensor | None = None, scale: Tensor | None = None
) -> QuantizedTensor:
    """Quantize as an engine does.

    Args:
        x: float16, bfloat16 or float32; the dtype in which the engine has the tensor.
        cast: the engine's cast.
        amax: float32 in the scale's shape, for a cast whose amax is from past steps; None measures ``x``.
        scale: float32 in the scale's shape, for a cast whose scale is from calibration; None makes one.

    Example:
        >>> x = torch.tensor([0.1, -0.2, 0.4])
        >>> quantize_as(x, EngineCast()).scale, quantize_as(x, EngineCast(power_of_two=PowerOfTwo.SCALE_UP)).scale
        (tensor(0.0009), tensor(0.0010))
    """
    x = x.detach()
    if scale is None:
        amax = _amax(x, cast) if amax is None else amax
        scale, encode_scale = _replaced(amax, *_scales(amax, cast, x.dtype), cast, x.dtype)
    else:
        scale = scale.float()
        encode_scale = scale.reciprocal()
    codes = cast_nearest(
        _limited(x, _scaled(x, cast, scale, encode_scale), cast),
        cast.format,
        nonfinite=Nonfinite.PROPAGATE if cast.saturation == Saturation.PROPAGATE else Nonfinite.SATURATE,
    )
    return QuantizedTensor(codes, stored_scale(scale, cast.scale_format), cast.granularity, x.dtype)


def _amax(x: Tensor, cast: EngineCast) -> Tensor:
    match cast.amax_of:
        case AmaxOf.FINITE:
            return measure(x, cast.granularity).amax
        case AmaxOf.NUMBERS:
            return cast.granularity.reduce_max(torch.where(x.isnan(), 0, x.abs())).float()
        case AmaxOf.ALL:
            return cast.granularity.reduce_max(x.abs()).float()


def _scales(amax: Tensor, cast: EngineCast, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The scale and the encode scale of each group by the formula, float32."""
    divided_in = cast.divided_in or dtype
    floored = amax.to(divided_in).clamp(min=cast.amax_floor)
    limit = torch.tensor(cast.largest, dtype=divided_in, device=amax.device)
    match cast.division:
        case Division.AMAX_BY_LIMIT:
            quotient = floored / limit
        case Division.AMAX_BY_RECIPROCAL:
            quotient = floored * torch.tensor(1 / cast.largest, dtype=divided_in, device=amax.device)
        case Division.LIMIT_BY_AMAX:
            quotient = limit / floored
        case Division.LIMIT_BY_RECIPROCAL:
            quotient = floored.reciprocal() * limit
    if cast.division not in ENCODE_DIVISIONS:
        scale = _rounded_scale(quotient.float(), cast)
        return scale, scale.reciprocal()
    encode_scale = _rounded_encode(_finite_encode(quotient.float(), cast, dtype), cast)
    scale = encode_scale.reciprocal()
    rounded = _rounded_scale(scale, cast)
    return rounded, encode_scale if rounded is scale else rounded.reciprocal()


def _replaced(
    amax: Tensor, scale: Tensor, encode_scale: Tensor, cast: EngineCast, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Both scales, with those of groups that are zero or not finite replaced."""
    if cast.zero_scale is not None:
        zero = scale == 0 if cast.zero_amax is None else ~(amax > cast.zero_amax)
        epsilon = torch.finfo(cast.divided_in or dtype).eps
        value = epsilon if isinstance(cast.zero_scale, str) else cast.zero_scale
        scale = torch.where(zero, value, scale)
        encode_scale = torch.where(zero, 1 / value if cast.zero_encode is None else cast.zero_encode, encode_scale)
    if cast.nonfinite_scale is not None:
        scale = torch.where(amax.isfinite(), scale, cast.nonfinite_scale)
        encode_scale = torch.where(amax.isfinite(), encode_scale, 1 / cast.nonfinite_scale)
    return scale, encode_scale


def _finite_encode(encode_scale: Tensor, cast: EngineCast, dtype: torch.dtype) -> Tensor:
    if cast.infinite_encode is None:
        return encode_scale
    of = dtype if isinstance(cast.infinite_encode, str) else cast.infinite_encode
    return torch.where(encode_scale.isinf(), torch.finfo(of).max, encode_scale)


def _rounded_encode(encode_scale: Tensor, cast: EngineCast) -> Tensor:
    match cast.power_of_two:
        case PowerOfTwo.ENCODE_DOWN:
            return torch.where(encode_scale.isfinite(), power_of_two_floor(encode_scale), encode_scale)
        case PowerOfTwo.ENCODE_DOWN_BY_LOG2:
            return encode_scale.log2().floor().exp2()
    return encode_scale


def _rounded_scale(scale: Tensor, cast: EngineCast) -> Tensor:
    """The scale itself where nothing changes it."""
    if cast.scale_floor:
        scale = scale.clamp(min=cast.scale_floor)
    match cast.power_of_two:
        case PowerOfTwo.SCALE_UP:
            bits = (
                scale.view(torch.int32) + ((1 << FP32.mantissa_bits) - 1)
            ) & 0x7F80_0000  # carries into the exponent
            scale = torch.where(scale.isfinite(), bits.view(torch.float32), scale)
        case PowerOfTwo.SCALE_UP_BY_LOG2:
            scale = scale.log2().ceil().exp2()
    return scale.clamp(E8M0.min_normal, E8M0.max) if cast.scale_format == E8M0 else scale


def _scaled(x: Tensor, cast: EngineCast, scale: Tensor, encode_scale: Tensor) -> Tensor:
    expand = cast.granularity.expand
    if cast.application == Application.DIVIDE:
        scaled = x.float() / expand(scale, x.shape)
    else:
        scaled = x.float() * expand(encode_scale, x.shape)
    return scaled.to(cast.applied_in or x.dtype)


def _limited(x: Tensor, scaled: Tensor, cast: EngineCast) -> Tensor:
    limited = scaled.clamp(-cast.largest, cast.largest)
    match cast.saturation:
        case Saturation.PROPAGATE:
            return torch.where(x.isinf(), math.inf, limited)
        case Saturation.NAN_TO_LIMIT:
            return limited.nan_to_num(nan=cast.largest)
        case Saturation.NAN_TO_MINUS_LIMIT:
            return limited.nan_to_num(nan=-cast.largest)
    return limited

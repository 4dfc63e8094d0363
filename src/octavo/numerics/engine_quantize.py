"""Codes and scales of an :class:`octavo.numerics.EngineCast`, bit for bit as the engine computes them.

The only rounding to FP8 is that of :func:`octavo.numerics.cast_nearest`.
"""

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.formats import E8M0, FP32
from octavo.numerics.cast import Nonfinite, cast_nearest, check_float
from octavo.numerics.engine_cast import (
    ENCODE_DIVISIONS,
    AmaxOf,
    Application,
    Division,
    EngineCast,
    PowerOfTwo,
    Saturation,
)
from octavo.numerics.quantized import QuantizedTensor, check_scale_fits, stored_scale
from octavo.numerics.scaling import Scaling, measure, power_of_two_floor

__all__ = ["quantize_as"]

ENGINE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def quantize_as(
    x: Tensor, cast: EngineCast, *, amax: Tensor | None = None, scale: Tensor | None = None
) -> QuantizedTensor:
    """Quantize as an engine does.

    Args:
        x: float16, bfloat16 or float32; the dtype in which the engine has the tensor.
        cast: the engine's cast.
        amax: float32 in the scale's shape, from which the scale is made; None measures ``x`` under dynamic scaling.
        scale: float32 in the scale's shape, used as it is, instead of an amax.

    Raises:
        ConfigError: another dtype, neither a scale nor an amax of a cast with static or delayed scaling, or one of
            another shape.

    Example:
        >>> from octavo.numerics.engine_cast import EngineCast, PowerOfTwo
        >>> x = torch.tensor([0.1, -0.2, 0.4])
        >>> quantize_as(x, EngineCast()).scale, quantize_as(x, EngineCast(power_of_two=PowerOfTwo.SCALE_UP)).scale
        (tensor(0.0009), tensor(0.0010))
    """
    _check(x, cast, amax, scale)
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


def _check(x: Tensor, cast: EngineCast, amax: Tensor | None, scale: Tensor | None) -> None:
    check_float(x, "the tensor to quantize as an engine", allowed=ENGINE_DTYPES)
    for name, tensor in (("amax", amax), ("scale", scale)):
        if tensor is not None:
            check_scale_fits(name, tensor, x, cast.granularity)
    if cast.scaling is not Scaling.DYNAMIC and amax is None and scale is None:
        raise ConfigError(
            f"a cast with {cast.scaling} scaling does not measure the tensor; give scale= or amax=, or replace its "
            "scaling by Scaling.DYNAMIC"
        )


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
            return torch.where(x.isinf(), x.to(limited.dtype), limited)
        case Saturation.NAN_TO_LIMIT:
            return limited.nan_to_num(nan=cast.largest)
        case Saturation.NAN_TO_MINUS_LIMIT:
            return limited.nan_to_num(nan=-cast.largest)
    return limited

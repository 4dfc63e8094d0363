"""The only cast from high precision to FP8.

    codes = RNE(fp32(x) · encode_scale)        compared with ±maximum after rounding

The product is FP32 whatever the input dtype: rounded to bfloat16 first, 1 E4M3 code in 32 would change. What happens
beyond the maximum is decided here and never left to ``Tensor.to``: for E4M3 its answer is NaN in torch up to 2.11 and
saturation, of infinities too, from 2.12 on. Two different questions have two different arguments:

- ``overflow``: a *finite* value that rounds beyond the maximum. ``"saturate"`` gives ±maximum, ``"nonfinite"`` gives
  ±Inf (NaN in a format without infinities).
- ``nonfinite``: an *infinite input*. ``"propagate"`` gives ±Inf (or NaN), so that a broken step shows where BF16 would
  show it; ``"saturate"`` gives ±maximum, as Hopper's satfinite conversions do. NaN stays NaN under both.

The sign of a NaN code is unspecified.
"""

import math
from enum import StrEnum

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.formats import FP8_FORMATS, Format, format_of
from octavo.numerics.random_bits import random_bits, seed_from

__all__ = [
    "NONFINITE_POLICIES",
    "Nonfinite",
    "Overflow",
    "Rounding",
    "cast_nearest",
    "cast_stochastic",
    "check_float",
    "check_fp8_format",
    "check_member",
    "check_tensor",
    "is_eager_cpu",
    "may_hold_nonfinite",
    "narrowed",
    "round_stochastic_by_torch",
]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
STOCHASTIC_BITS = 20  # the mantissa bits of an FP32 value that E4M3 drops; E5M2 drops one more


class Overflow(StrEnum):
    """Result of casting a finite value beyond the maximum."""

    SATURATE = "saturate"
    NONFINITE = "nonfinite"


class Nonfinite(StrEnum):
    """Result of casting an infinite value."""

    PROPAGATE = "propagate"
    SATURATE = "saturate"


class Rounding(StrEnum):
    """Choice between the two neighbouring codes of a number."""

    NEAREST = "nearest"  # ties to even
    STOCHASTIC = "stochastic"  # either, so that the expected value is the number: see cast_stochastic


_OVERFLOW_POLICIES, NONFINITE_POLICIES = tuple(Overflow), tuple(Nonfinite)  # no graph traces how they are made


def cast_nearest(
    x: Tensor,
    fmt: Format,
    encode_scale: Tensor | None = None,
    *,
    overflow: Overflow = Overflow.SATURATE,
    nonfinite: Nonfinite = Nonfinite.PROPAGATE,
) -> Tensor:
    """Multiply by ``encode_scale`` in FP32 and round to the nearest code, ties to even.

    Args:
        x: any shape; float16, bfloat16, float32, or float64 (rounded to float32 first, ±Inf beyond its range).
        fmt: one of the four FP8 formats.
        encode_scale: float32, broadcastable to ``x``; None multiplies by nothing.
        overflow: see the module's text.
        nonfinite: see the module's text.

    Returns:
        Codes of dtype ``fmt.torch_dtype``, shaped like ``x``. Subnormal results are kept, signed zeros too (FNUZ has
        none).

    Raises:
        ConfigError: ``x`` is not floating point, ``fmt`` is not an FP8 format, or a policy is none of its enum's.

    Example:
        >>> from octavo.formats import E4M3
        >>> cast_nearest(torch.tensor([0.3, -1e9, 464.0]), E4M3).float().tolist()
        [0.3125, -448.0, 448.0]
    """
    check_member("overflow", overflow, _OVERFLOW_POLICIES)
    x = _checked(x, fmt, nonfinite)
    scaled = _scaled(x, encode_scale)
    limited = _clamped(scaled, fmt, in_place=encode_scale is not None and overflow == Overflow.SATURATE)
    if overflow == Overflow.NONFINITE:
        limited = torch.where(_rounds_beyond_max(scaled, fmt) & x.isfinite(), scaled * math.inf, limited)
        limited = limited if fmt.inf_codes else torch.where(limited.isinf(), math.nan, limited)
    return _restore_infinities(limited, x, fmt, nonfinite).to(fmt.torch_dtype)


def cast_stochastic(
    x: Tensor,
    fmt: Format,
    encode_scale: Tensor | None = None,
    *,
    generator: torch.Generator | None = None,
    nonfinite: Nonfinite = Nonfinite.PROPAGATE,
) -> Tensor:
    """Round up in magnitude with a probability equal to the dropped fraction, so that the expected value is ``x``.

    A random number of 20 bits is added below the kept mantissa and the rest is cut off. Values that ``fmt`` holds
    exactly never move; nothing crosses ±maximum.

    Args:
        x: as in :func:`cast_nearest`.
        fmt: as in :func:`cast_nearest`.
        encode_scale: as in :func:`cast_nearest`.
        generator: the seed of the random bits is drawn from it; the same state gives the same codes on every device.
            None is torch's default generator of the CPU.
        nonfinite: see the module's text.

    Example:
        >>> from octavo.formats import E4M3
        >>> x = torch.full((10000,), 1.03125)  # a quarter of the way from 1 to 1.125
        >>> codes = cast_stochastic(x, E4M3, generator=torch.Generator().manual_seed(0))
        >>> round((codes.float() > 1).float().mean().item(), 2)
        0.25
    """
    x = _checked(x, fmt, nonfinite)
    scaled = _restore_infinities(_scaled(x, encode_scale).clamp(-fmt.max, fmt.max), x, fmt, nonfinite)
    drawn = random_bits(seed_from(generator), scaled.shape, scaled.device)
    random = (drawn >> (32 - STOCHASTIC_BITS)) & ((1 << STOCHASTIC_BITS) - 1)
    result: Tensor = torch.ops.octavo.round_stochastic(scaled.detach(), random, fmt.torch_dtype)
    return result


def round_stochastic_by_torch(scaled: Tensor, random: Tensor, dtype: torch.dtype) -> Tensor:
    """The formula, for every device and format.

    Args:
        scaled: float32; finite numbers lie within ±maximum, others become what ``dtype`` has for them.
        random: 20 bits for each.
        dtype: of the codes.

    Returns:
        Codes shaped like ``scaled``, contiguous.
    """
    fmt = format_of(dtype)
    exact = torch.where(scaled.isfinite(), scaled, 0).double()
    exponent = torch.frexp(exact).exponent.clamp(min=2 - fmt.bias) - 1  # of subnormals: the one they share
    quantum = torch.ldexp(torch.ones_like(exact), exponent - fmt.mantissa_bits)
    rounded = (exact.abs() / quantum + random.double() / (1 << STOCHASTIC_BITS)).floor() * quantum
    limited = rounded.copysign(exact).float()  # within ±maximum, which is exact and so does not move
    others = scaled if fmt.inf_codes else torch.full_like(scaled, math.nan).copysign(scaled)
    return torch.where(scaled.isfinite(), limited, others).to(dtype).contiguous()


def _round_stochastic_shape(scaled: Tensor, _: Tensor, dtype: torch.dtype) -> Tensor:
    return scaled.new_empty(scaled.shape, dtype=dtype)


# An operator, for which a device may have a faster kernel than this formula.
torch.library.define("octavo::round_stochastic", "(Tensor scaled, Tensor random, ScalarType dtype) -> Tensor")
torch.library.impl("octavo::round_stochastic", "CompositeExplicitAutograd")(round_stochastic_by_torch)
torch.library.register_fake("octavo::round_stochastic")(_round_stochastic_shape)


def may_hold_nonfinite(x: Tensor) -> bool:
    """Return False if one cheap pass proves that every element is finite.

    Only an eager CPU tensor is read (:func:`is_eager_cpu`). Reading a value would break a traced graph, and on an
    accelerator the wait costs more than the element-wise mask that follows True.

    Example:
        >>> may_hold_nonfinite(torch.ones(3)), may_hold_nonfinite(torch.tensor([1.0, math.inf]))
        (False, True)
    """
    if not is_eager_cpu(x):
        return True
    if x.numel() == 0:
        return False
    low, high = x.aminmax()
    return not (math.isfinite(low) and math.isfinite(high))


def is_eager_cpu(x: Tensor) -> bool:
    """Return whether ``x`` is an eager CPU tensor, whose values Python may read at no cost.

    Example:
        >>> is_eager_cpu(torch.ones(3))
        True
    """
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def check_tensor(x: object, what: str) -> None:
    """Raise ConfigError unless ``x`` is a tensor."""
    if not isinstance(x, Tensor):
        raise ConfigError(f"{what} must be a torch.Tensor, not {type(x).__name__}; convert it with torch.as_tensor")


def check_float(x: Tensor, what: str, *, allowed: tuple[torch.dtype, ...] = FLOATS) -> None:
    """Raise ConfigError unless ``x`` is a tensor of one of ``allowed``, by default of at least 16 bits."""
    check_tensor(x, what)
    if x.dtype not in allowed:
        *first, last = (str(dtype).removeprefix("torch.") for dtype in allowed)
        raise ConfigError(
            f"{what} must be a {', '.join(first)} or {last} tensor, not {x.dtype}; "
            "convert it first, e.g. with x.float()"
        )


def check_fp8_format(fmt: object) -> None:
    """Raise ConfigError unless ``fmt`` is one of the four FP8 formats."""
    if fmt not in FP8_FORMATS:
        given = str(fmt) if isinstance(fmt, Format) else repr(fmt)
        allowed = ", ".join(f"octavo.formats.{row}" for row in FP8_FORMATS)
        raise ConfigError(f"cannot cast to {given}; use one of {allowed}")


def narrowed(x: Tensor) -> Tensor:
    """float64 as float32, in which what lies beyond float32's range is infinite; other dtypes as they are.

    Example:
        >>> narrowed(torch.tensor([1.0, 1e300], dtype=torch.float64))
        tensor([1., inf])
    """
    return x.float() if x.dtype is torch.float64 else x


def _checked(x: Tensor, fmt: Format, nonfinite: Nonfinite) -> Tensor:
    check_float(x, "the tensor to quantize")
    check_fp8_format(fmt)
    check_member("nonfinite", nonfinite, NONFINITE_POLICIES)
    return narrowed(x)


def check_member(what: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise ConfigError unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ConfigError(f"{what} must be one of {', '.join(map(str, allowed))}, not {value!r}")


def _scaled(x: Tensor, encode_scale: Tensor | None) -> Tensor:
    return x.float() if encode_scale is None else x.float() * encode_scale


def _clamped(scaled: Tensor, fmt: Format, *, in_place: bool) -> Tensor:
    """``scaled`` within ±maximum; a fresh product is reused, since a new buffer costs as much as the pass."""
    return scaled.clamp_(-fmt.max, fmt.max) if in_place else scaled.clamp(-fmt.max, fmt.max)


def _rounds_beyond_max(scaled: Tensor, fmt: Format) -> Tensor:
    """Mask of values that round beyond the maximum: above the midpoint, or on it where the maximum is odd."""
    midpoint = fmt.max + (fmt.max - fmt.magnitude(fmt.max_code - 1)) / 2
    tie_rounds_up = fmt.max_code % 2 == 1
    return scaled.abs() >= midpoint if tie_rounds_up else scaled.abs() > midpoint


def _restore_infinities(limited: Tensor, x: Tensor, fmt: Format, nonfinite: Nonfinite) -> Tensor:
    """Put ±Inf (or NaN) back where the *input* was infinite; a finite input whose product overflowed is not."""
    if nonfinite == Nonfinite.SATURATE or not may_hold_nonfinite(x):
        return limited
    infinity = x.float() if fmt.inf_codes else torch.full_like(limited, math.nan)
    return torch.where(x.isinf(), infinity, limited)

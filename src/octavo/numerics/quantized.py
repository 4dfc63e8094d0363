"""A tensor in FP8: codes, scale, and what is needed to read them.

    hp ≈ data · scale

``scale`` decodes. It is what is stored, passed and saved; the encode scale (its reciprocal up to one rounding) exists
only inside :func:`quantize`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.formats import E8M0, FP8_FORMATS, FP32, Format, format_of
from octavo.numerics.cast import (
    Nonfinite,
    Rounding,
    cast_nearest,
    cast_stochastic,
    check_float,
    check_fp8_format,
    is_eager_cpu,
)
from octavo.numerics.cast_spec import CastSpec
from octavo.numerics.granularity import (
    Granularity,
    PerBlock,
    granularity_as_list,
    granularity_from_list,
    granularity_or_default,
)
from octavo.numerics.scaling import (
    AMAX_FLOOR,
    Measurement,
    ScaleRounding,
    check_scale_options,
    e8m0_from_scale,
    encode_scale_from_amax,
    measure,
    scale_from_e8m0,
)
from octavo.numerics.tensor_summary import tensor_summary

__all__ = [
    "FP8_DTYPES",
    "QuantizedTensor",
    "cast_by_torch",
    "check_scale_fits",
    "check_scale_values",
    "checked_spec",
    "dequantize",
    "dequantize_by_torch",
    "quantize",
    "rows_of_scales",
    "stored_scale",
]

FP8_DTYPES = tuple(row.torch_dtype for row in FP8_FORMATS)
_SCALE_DTYPES = (torch.float32, torch.uint8)


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """Codes and their scale.

    Attributes:
        data: codes, an FP8 dtype, any shape.
        scale: float32, or uint8 for E8M0 bytes, 2^(byte - 127); shape ``granularity.scale_shape(data.shape)``;
            hp ≈ data · scale.
        granularity: which elements share a scale.
        hp_dtype: dtype that :meth:`dequantize` returns: that of the quantized tensor.

    Raises:
        ConfigError: the scale's shape is not the granularity's.

    Example:
        >>> from octavo.numerics import PerTensor
        >>> codes = torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn)
        >>> QuantizedTensor(codes, torch.tensor(0.5), PerTensor(), torch.float32).dequantize()
        tensor([ 0.5000, -1.0000])
    """

    data: Tensor
    scale: Tensor
    granularity: Granularity
    hp_dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.data.dtype not in FP8_DTYPES:
            raise ConfigError(f"codes have an FP8 dtype, not {self.data.dtype}; octavo.quantize makes them")
        if self.scale.device != self.data.device:
            raise ConfigError(f"the scale is on {self.scale.device} and the codes on {self.data.device}; move it there")
        if self.scale.dtype not in _SCALE_DTYPES:
            raise ConfigError(f"a scale is float32, or uint8 for E8M0 bytes, not {self.scale.dtype}")
        expected = self.granularity.scale_shape(self.data.shape)
        if self.scale.shape != expected:
            raise ConfigError(
                f"a {self.granularity} scale of codes {tuple(self.data.shape)} has shape {tuple(expected)}, "
                f"not {tuple(self.scale.shape)}"
            )

    @property
    def format(self) -> Format:
        """The format of the codes."""
        return format_of(self.data.dtype)

    @property
    def fp32_scale(self) -> Tensor:
        """The scale as numbers, whichever way it is stored."""
        return scale_from_e8m0(self.scale) if self.scale.dtype is torch.uint8 else self.scale

    @property
    def shape(self) -> torch.Size:
        """Shape of the codes."""
        return self.data.shape

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scale."""
        return self.data.nbytes + self.scale.nbytes

    def dequantize(self) -> Tensor:
        """See :func:`dequantize`."""
        return dequantize(self)

    def _repr_html_(self) -> str | None:
        return tensor_summary(self.data, self.scale, self.granularity, self.hp_dtype)

    def t(self) -> "QuantizedTensor":
        """The transpose, without copying codes.

        Raises:
            ConfigError: not a matrix, or the granularity's groups are not those of the transpose (per row); quantize
                the transpose instead.
        """
        if self.data.ndim != 2:
            raise ConfigError(f"t() transposes a matrix, not shape {tuple(self.shape)}; flatten it first")
        if not self.granularity.orientation_free:
            raise ConfigError(
                f"a {self.granularity} tensor cannot be transposed; quantize the transposed tensor instead"
            )
        scale = self.scale.t() if self.scale.ndim == 2 else self.scale
        return QuantizedTensor(self.data.t(), scale, self.granularity, self.hp_dtype)


def quantize(
    x: Tensor,
    fmt: Format,
    *,
    granularity: Granularity | None = None,
    amax: Tensor | None = None,
    scale: Tensor | None = None,
    scale_rounding: ScaleRounding = ScaleRounding.FP32,
    scale_format: Format = FP32,
    amax_floor: float = AMAX_FLOOR,
    margin: int = 0,
    nonfinite: Nonfinite = Nonfinite.PROPAGATE,
    rounding: Rounding = Rounding.NEAREST,
) -> QuantizedTensor:
    """``octavo.quantize`` by torch's operations alone; its arguments and errors are described there.

    Args:
        rounding: stochastic draws its seed from torch's default generator of the CPU.

    Example:
        >>> from octavo.formats import E4M3
        >>> q = quantize(torch.tensor([0.1, -0.2, 0.4]), E4M3)
        >>> q.dequantize()
        tensor([ 0.1000, -0.2000,  0.4000])

    Source: formula of numerics/scaling.py; rounding of numerics/cast.py.
    """
    spec = checked_spec(
        x, fmt, granularity, amax, scale, scale_rounding=scale_rounding, scale_format=scale_format,
        amax_floor=amax_floor, margin=margin, nonfinite=nonfinite, rounding=rounding,
    )  # fmt: skip
    return cast_by_torch(x, spec, amax=amax, scale=scale)


def cast_by_torch(
    x: Tensor,
    spec: CastSpec,
    *,
    amax: Tensor | None = None,
    scale: Tensor | None = None,
    measurement: Measurement | None = None,
) -> QuantizedTensor:
    """Cast without checks; the definition that every kernel is compared with.

    Args:
        x: float16, bfloat16, float32 or float64, any shape the granularity allows.
        spec: how to cast.
        amax: float32 in the scale's shape, from which the scale is computed; None measures ``x``.
        scale: float32 in the scale's shape, used as it is.
        measurement: what :func:`octavo.numerics.measure` found in ``x`` at this granularity; None measures it here.
    """
    x = x.detach()
    nonfinite = spec.nonfinite
    if scale is not None:
        stored = scale.detach().float()
        encode_scale = stored.reciprocal().clamp(max=torch.finfo(torch.float32).max)
    else:
        if measurement is None and amax is None:
            measurement = measure(x, spec.granularity)
        if measurement is not None:
            amax = measurement.amax if amax is None else amax
            if measurement.nonfinite is None:
                nonfinite = Nonfinite.SATURATE  # nothing to propagate: saves the cast another look
        assert amax is not None
        encode_scale = encode_scale_from_amax(
            amax, spec.format, rounding=spec.scale_rounding, amax_floor=spec.amax_floor, margin=spec.margin
        )
        stored = encode_scale.reciprocal()
    cast = cast_stochastic if spec.rounding == Rounding.STOCHASTIC else cast_nearest
    data = cast(x, spec.format, spec.granularity.expand(encode_scale, x.shape), nonfinite=nonfinite)
    return QuantizedTensor(data, stored_scale(stored, spec.scale_format), spec.granularity, x.dtype)


def checked_spec(
    x: Tensor,
    fmt: Format,
    granularity: Granularity | None,
    amax: Tensor | None,
    scale: Tensor | None,
    *,
    scale_rounding: ScaleRounding,
    scale_format: Format = FP32,
    amax_floor: float = AMAX_FLOOR,
    margin: int = 0,
    **options: Any,
) -> CastSpec:
    """Description of a cast from :func:`quantize`'s arguments.

    Raises:
        ConfigError: what :func:`octavo.quantize` refuses; values are checked where that costs nothing.
    """
    check_float(x, "the tensor to quantize")
    check_scale_options(scale_rounding, amax_floor, margin)
    if scale is not None and amax is not None:
        raise ConfigError("quantize takes an amax or a scale, not both; leave one out")
    if scale is not None and scale_format == E8M0:
        scale_rounding = ScaleRounding.RCEIL  # no scale is made, so that no rounding is ruled out
    check_fp8_format(fmt)
    describe = CastSpec if torch.compiler.is_compiling() else _described  # to describe a cast takes half as long as it
    spec = describe(
        format=fmt,
        granularity=granularity_or_default(granularity),
        scale_rounding=scale_rounding,
        scale_format=scale_format,
        amax_floor=amax_floor,
        margin=int(margin) if isinstance(margin, float) else margin,
        **options,
    )
    for name, tensor in (("amax", amax), ("scale", scale)):
        if tensor is None:
            continue
        check_scale_fits(name, tensor, x, spec.granularity)
        check_scale_values(name, tensor, zero_allowed=name == "amax")
    if scale is not None and scale_format == E8M0:
        _check_power_of_two(scale.detach().float())
    return spec


_described: Callable[..., CastSpec] = lru_cache(maxsize=256)(CastSpec)


def stored_scale(scale: Tensor, scale_format: Format) -> Tensor:
    """A float32 scale in its storage format: unchanged, or as E8M0 bytes."""
    return e8m0_from_scale(scale) if scale_format == E8M0 else scale


def _check_power_of_two(scale: Tensor) -> None:
    stored = scale_from_e8m0(e8m0_from_scale(scale))
    if is_eager_cpu(scale) and not torch.equal(stored, scale):
        raise ConfigError(f"E8M0 holds powers of two, not the scale {scale[stored != scale][0].item()}")


def check_scale_fits(name: str, tensor: object, x: Tensor, granularity: Granularity) -> None:
    """Refuse an amax or scale of another device than ``x``, or of another shape than its groups have."""
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"{name} must be a tensor in the scale's shape, not {tensor!r}; wrap it in torch.tensor()")
    if tensor.device != x.device:
        raise ConfigError(f"the {name} is on {tensor.device} and the tensor on {x.device}; move it there first")
    expected = granularity.scale_shape(x.shape)
    if tensor.shape != expected:
        shapes = f"{tuple(x.shape)} needs a scale of shape {tuple(expected)}, not {tuple(tensor.shape)}"
        raise ConfigError(f"{granularity} of {shapes}")


def check_scale_values(name: str, tensor: Tensor, *, zero_allowed: bool) -> None:
    """Refuse an amax or scale that no tensor has; values are checked on an eager CPU tensor only."""
    if not is_eager_cpu(tensor):
        return
    wrong = ~((tensor >= 0 if zero_allowed else tensor > 0) & tensor.isfinite())
    if wrong.any():
        sign = "not negative" if zero_allowed else "positive"
        raise ConfigError(f"every {name} must be finite and {sign}, not {tensor[wrong][0].item()}")


def rows_of_scales(q: QuantizedTensor) -> Tensor:
    """Scales of a matrix as float32 [R, blocks of K], one row for each row of codes (1 row for a per-tensor scale).

    Example:
        >>> from octavo.formats import E4M3
        >>> rows_of_scales(quantize(torch.ones(3, 300), E4M3, granularity=PerBlock(2, 128))).shape
        torch.Size([3, 3])
    """
    scale = q.fp32_scale
    if isinstance(q.granularity, PerBlock):
        if q.granularity.rows == 1:
            return scale
        return scale.repeat_interleave(min(q.granularity.rows, q.shape[0]), dim=0)[: q.shape[0]]
    return scale.reshape(-1, 1)


def dequantize(q: QuantizedTensor) -> Tensor:
    """``fp32(data) · scale`` in FP32, then cast to ``q.hp_dtype``; NaN and ±Inf codes decode to themselves.

    A finite code whose value lies beyond ``hp_dtype`` becomes ±Inf, as any cast to it does.

    Example:
        >>> from octavo.formats import E5M2
        >>> dequantize(quantize(torch.tensor([3.0, 1.0], dtype=torch.bfloat16), E5M2))
        tensor([3.0000, 1.0703], dtype=torch.bfloat16)
    """
    if not isinstance(q, QuantizedTensor):
        raise TypeError(f"dequantize takes a QuantizedTensor, not {type(q).__name__}; octavo.quantize makes one")
    if torch.compiler.is_compiling() or q.scale.requires_grad:  # a formula can be fused, and differentiated
        return _decoded(q.data, q.granularity.expand(q.fp32_scale, q.data.shape), q.hp_dtype)
    result: Tensor = torch.ops.octavo.dequantize(q.data, q.fp32_scale, granularity_as_list(q.granularity), q.hp_dtype)
    return result


def _decoded(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (codes.float() * scale).to(dtype)


def dequantize_by_torch(codes: Tensor, scale: Tensor, granularity: list[int], dtype: torch.dtype) -> Tensor:
    """The formula, for every device and format."""
    return _decoded(codes, granularity_from_list(granularity).expand(scale, codes.shape), dtype)


# An operator, for which a device may have a faster kernel than this formula.
torch.library.define(
    "octavo::dequantize", "(Tensor codes, Tensor scale, int[] granularity, ScalarType dtype) -> Tensor"
)
torch.library.impl("octavo::dequantize", "CompositeExplicitAutograd")(dequantize_by_torch)

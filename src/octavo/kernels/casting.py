"""Public casts, ``octavo.quantize`` and ``octavo.fake_quantize``: checks before the dispatch; and decoding by it."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import octavo.kernels.dispatch as dispatch
from octavo.errors import ConfigError
from octavo.formats import FP32, Format
from octavo.kernels.backend import refuse_transforms
from octavo.kernels.tracing import unaliased
from octavo.numerics import (
    AmaxRecord,
    Granularity,
    Nonfinite,
    QuantizedTensor,
    ScaleRounding,
)
from octavo.numerics.cast import check_float
from octavo.numerics.granularity import granularity_from_list
from octavo.numerics.quantized import checked_spec
from octavo.numerics.scaling import AMAX_FLOOR

__all__ = ["fake_quantize", "quantize"]


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
) -> QuantizedTensor:
    """Scale into the format's range and round to nearest even, saturating.

        encode_scale = maximum · 2^-margin / amax;  data = cast(fp32(x) · encode_scale);  scale = 1 / encode_scale

    Args:
        x: float16, bfloat16, float32 or float64 (taken as float32); any shape the granularity allows. No gradient
            passes through; :func:`octavo.fake_quantize` lets one.
        fmt: one of the FP8 formats.
        granularity: which elements share a scale; None is one scale for the tensor.
        amax: the largest magnitude to provide for, in the scale's shape; None measures ``x`` (dynamic scaling). What
            lies beyond saturates.
        scale: a fixed decode scale instead (static scaling); ``scale_rounding``, ``amax_floor`` and ``margin`` play no
            part then.
        scale_rounding: which numbers the scale may be; the rules stand in numerics/scaling.py.
        scale_format: FP32, or E8M0 for one byte a scale, which must be a power of two.
        amax_floor: smaller amaxes count as this; torchao's is 1e-12.
        margin: binades to leave free above amax.
        nonfinite: what an infinite element becomes; NaN stays NaN. Neither changes any other element.

    Raises:
        ConfigError: not a float tensor, not an FP8 format, a scale of the wrong shape or not positive and finite, an
            amax that is negative or not finite, both ``amax`` and ``scale``, or a negative margin or floor.

    Example:
        >>> import octavo
        >>> q = quantize(torch.tensor([0.1, -0.2, 0.4]), octavo.E4M3)
        >>> q.dequantize()
        tensor([ 0.1000, -0.2000,  0.4000])

    Source: formula of numerics/scaling.py; rounding of numerics/cast.py.
    """
    spec = checked_spec(
        x, fmt, granularity, amax, scale, scale_rounding=scale_rounding, scale_format=scale_format,
        amax_floor=amax_floor, margin=margin, nonfinite=nonfinite,
    )  # fmt: skip
    return dispatch.cast(x, spec, amax=amax, scale=scale, record=AmaxRecord()).output


def fake_quantize(
    x: Tensor,
    fmt: Format,
    *,
    granularity: Granularity | None = None,
    scale_rounding: ScaleRounding = ScaleRounding.FP32,
    out: Tensor | None = None,
) -> Tensor:
    """Quantize and dequantize: the values FP8 would hold, in ``x``'s dtype; the gradient passes straight through.

    Args:
        x: as in :func:`octavo.quantize`.
        fmt: as in :func:`octavo.quantize`.
        granularity: as in :func:`octavo.quantize`.
        scale_rounding: as in :func:`octavo.quantize`.
        out: where to write, shaped like ``x`` and in its dtype; ``x`` itself rounds it in place. No gradient passes
            through then.

    Raises:
        ConfigError: what :func:`octavo.quantize` refuses, an ``out`` of another shape, dtype or device, or one where a
            gradient is wanted.

    Example:
        >>> from octavo.formats import E4M3
        >>> x = torch.tensor([0.3, 448.0], requires_grad=True)
        >>> y = fake_quantize(x, E4M3)
        >>> y.sum().backward()
        >>> y.tolist(), x.grad.tolist()
        ([0.3125, 448.0], [1.0, 1.0])
    """
    if out is not None:
        _check_out(x, out)
        with torch.no_grad():
            return _rounded(x, fmt, granularity, scale_rounding, out)
    refuse_transforms("octavo.fake_quantize without out=")
    result: Tensor = _FakeQuantize.apply(x, fmt, granularity, scale_rounding)  # type: ignore[no-untyped-call]
    return result


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: object, x: Tensor, fmt: Format, granularity: Granularity | None, scale_rounding: ScaleRounding
    ) -> Tensor:
        return unaliased(_rounded(x, fmt, granularity, scale_rounding))

    @staticmethod
    @once_differentiable
    def backward(ctx: object, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        return grad_output, None, None, None


def _rounded(
    x: Tensor, fmt: Format, granularity: Granularity | None, scale_rounding: ScaleRounding, out: Tensor | None = None
) -> Tensor:
    spec = checked_spec(x, fmt, granularity, None, None, scale_rounding=scale_rounding)
    return dispatch.fake_quantize(x, spec, out=out)


def _check_out(x: Tensor, out: Tensor) -> None:
    check_float(x, "the tensor to quantize")
    wanted = (tuple(x.shape), x.dtype, x.device)
    if (tuple(out.shape), out.dtype, out.device) != wanted:
        raise ConfigError(
            f"out must be like x, {wanted[1]} of shape {wanted[0]} on {wanted[2]}, "
            f"not {out.dtype} of shape {tuple(out.shape)} on {out.device}"
        )
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise ConfigError("fake_quantize cannot pass a gradient through out; leave out out, or call it in no_grad()")


def _dequantize(codes: Tensor, scale: Tensor, granularity: list[int], dtype: torch.dtype) -> Tensor:
    """Implementation of numerics' operator, which has the formula for all other devices."""
    return dispatch.dequantize(codes, scale, granularity_from_list(granularity), dtype)


torch.library.impl("octavo::dequantize", "CPU")(_dequantize)
torch.library.impl("octavo::dequantize", "CUDA")(_dequantize)

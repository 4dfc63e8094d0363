"""Statistics of one cast, from a tensor and its FP8 codes, and of one GEMM.

A cast needs several numbers because each misses some failures: the SQNR does not show underflow, underflow does not
show saturation, and neither shows codes that belong to another tensor.

| field               | meaning                                                                       | of            |
|---------------------|-------------------------------------------------------------------------------|---------------|
| amax                | largest finite magnitude                                                      | all elements  |
| nonfinite           | NaN and ±Inf elements before the cast                                         | all elements  |
| saturation_fraction | elements beyond the largest value that the scale represents                   | all elements  |
| stale_ratio         | g = amax now / amax the scale was made for, maximum over scaling groups       | all elements  |
| least_stale_ratio   | minimum g over scaling groups with an amax above ten times the floor          | all elements  |
| scale               | decode scale, maximum over scaling groups                                     | all groups    |
| rms                 | sqrt(mean x²)                                                                 | sampled rows  |
| kurtosis            | mean x⁴ / (mean x²)²: 3 for a Gaussian                                        | sampled rows  |
| zero_fraction       | x = 0                                                                         | sampled rows  |
| underflow_fraction  | nonzeros with code 0                                                          | sampled rows  |
| flushed_energy      | share of Σ x² in nonzeros with code 0                                         | sampled rows  |
| sqnr_db             | 10·log10(Σ x² / Σ (y - x)²)                                                   | sampled rows  |
| cosine              | Σ x·y / sqrt(Σ x² · Σ y²)                                                     | sampled rows  |
| signed_error        | Σ sign(x)·(y - x) / Σ |x|                                                     | sampled rows  |
| code_mismatch       | codes farther from x than the correct codes of x under this scale             | sampled rows  |

x is the tensor in high precision and y its decoded codes. Sums run over finite elements, in FP64. Undefined numbers
(the SQNR of an exact cast, the kurtosis of zeros) are NaN.

During a step only sums are computed, on the tensors' device and without synchronization: CAST_SUMS of each cast (by a
native kernel on a CPU) and PRODUCT_SUMS of each GEMM. The numbers are derived from them after the step.

Sampled rows are an odd number of rows apart: tokens are stored sequence after sequence, and an even distance would
often select the same position of each, such as the first tokens with their outliers. Of a transposed view, columns are
sampled instead, since they are contiguous.

A GEMM is measured on sampled rows of both operands by two numbers: the SQNR of its result against high precision, and
the bias of its sums on a Hopper tensor core, Σ sign(f)·(h - f) / Σ |f|, with f accumulated in FP32 and h as set by the
recipe's ``accumulate``; NaN if scales change along K.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.kernels import cast_statistics as native_statistics
from octavo.kernels import native_gemm, quantize, scaled_mm
from octavo.kernels.native_bindings import is_transposed
from octavo.numerics import Accumulate, PerBlock, PerRow, PerTensor, QuantizedTensor, dequantize, measure
from octavo.numerics.cast import is_eager_cpu, narrowed
from octavo.numerics.metrics import saturation_amax
from octavo.numerics.quantized import rows_of_scales
from octavo.numerics.scaling import AMAX_FLOOR

__all__ = [
    "CAST_FIELDS",
    "CAST_SUMS",
    "PRODUCT_FIELDS",
    "PRODUCT_SUMS",
    "cast_numbers",
    "cast_sums",
    "product_numbers",
    "product_sums",
    "spread",
    "spread_indices",
    "take_rows",
]

CAST_FIELDS = (
    "amax",
    "rms",
    "kurtosis",
    "nonfinite",
    "zero_fraction",
    "saturation_fraction",
    "underflow_fraction",
    "flushed_energy",
    "sqnr_db",
    "cosine",
    "signed_error",
    "scale",
    "stale_ratio",
    "code_mismatch",
    "least_stale_ratio",
)
CAST_SUMS = (  # in the order of kernels/native/kernels.h
    *("elements", "nonfinite", "saturated", "amax", "scale", "stale_ratio"),  # of all elements
    *("finite", "nonzeros", "flushed", "mismatched"),  # of sampled rows, as all below
    *("energy", "fourth_powers", "flushed_energy", "noise", "product", "decoded_energy", "magnitude", "signed_error"),
    "least_stale_ratio",  # of all elements; not computed by the native kernel
)
PRODUCT_FIELDS = ("sqnr_db", "accumulation_bias")
PRODUCT_SUMS = ("energy", "noise", "magnitude", "signed_error")  # in the order of native/comparison.h
SAMPLED_ELEMENTS = 1 << 14
TIE = 1.001  # x · encode_scale and x / scale may differ in the last bit, which decides ties (cast_sums.h)
Floats = NDArray[np.float64]


def cast_sums(x: Tensor, quantized: QuantizedTensor, *, amax_floor: float = AMAX_FLOOR) -> Tensor:
    """Sums of one cast, as input of :func:`cast_numbers`: float64 [len(CAST_SUMS)] on the device of ``x``.

    Args:
        x: [M, K] before the cast, not empty.
        quantized: its codes and scales.
        amax_floor: lower clamp of the amaxes that the scales were computed from.

    Example:
        >>> import octavo
        >>> x = torch.tensor([[3.0, -4.0, 0.0, 1e-6]])
        >>> numbers = cast_numbers(cast_sums(x, octavo.quantize(x, octavo.E4M3)).numpy())
        >>> [
        ...     round(float(numbers[CAST_FIELDS.index(name)]), 2)
        ...     for name in ("amax", "stale_ratio", "underflow_fraction")
        ... ]
        [4.0, 1.0, 0.33]
    """
    is_transposed_view = is_transposed(x)
    size, row_length = x.shape[::-1] if is_transposed_view else x.shape
    rows = spread(size, SAMPLED_ELEMENTS // row_length)
    if native_statistics.sums(x, quantized):
        return native_statistics.cast_sums(x, quantized, rows, amax_floor=amax_floor)
    if is_transposed_view:
        x, quantized = x.t(), _transpose(quantized)
    return _sums_by_torch(x, quantized, rows, amax_floor=amax_floor)


@torch.no_grad()
def _sums_by_torch(x: Tensor, quantized: QuantizedTensor, rows: slice, *, amax_floor: float) -> Tensor:
    """Reference implementation for every device and format."""
    x, scale = narrowed(x.detach()), quantized.fp32_scale
    measurement = measure(x, quantized.granularity)
    sums_of_all_elements = {
        "elements": torch.full((), x.numel(), device=x.device),
        "nonfinite": torch.zeros((), device=x.device) if measurement.nonfinite is None else measurement.nonfinite,
        "saturated": _count_saturated(x, quantized, measurement.amax),
        "amax": measurement.amax.amax(),
        "scale": scale.amax(),
        "stale_ratio": (measurement.amax / (scale * quantized.format.max)).amax(),
        "least_stale_ratio": native_statistics.least_stale_ratio(
            measurement.amax, scale, quantized.format, amax_floor=amax_floor
        ),
    }
    sums = sums_of_all_elements | _sampled_sums(x[rows], take_rows(quantized, rows))
    return torch.stack([sums[name].double() for name in CAST_SUMS])


def _count_saturated(x: Tensor, quantized: QuantizedTensor, amaxes: Tensor) -> Tensor:
    """Number of finite elements beyond the range of their scale."""
    limit = saturation_amax(quantized)
    if is_eager_cpu(x) and not (amaxes > limit).any():
        return torch.zeros((), device=x.device)
    highest = limit.float()  # rounded down: a 16-bit element would be compared in 16 bits with a float64 scalar
    highest = torch.where(highest > limit, highest.nextafter(torch.zeros_like(highest)), highest)
    magnitudes = x.float().abs()
    return ((magnitudes > quantized.granularity.expand(highest, x.shape)) & (magnitudes < torch.inf)).sum()


def _sampled_sums(x: Tensor, quantized: QuantizedTensor) -> dict[str, Tensor]:
    correct = quantize(x, quantized.format, granularity=quantized.granularity, scale=quantized.fp32_scale)
    codes = quantized.data.view(torch.uint8)
    y = dequantize(QuantizedTensor(quantized.data, quantized.scale, quantized.granularity, torch.float32))
    finite = x.isfinite()
    nonzero = finite & (x != 0)
    flushed = nonzero & (codes & 0x7F == 0)
    correct_values = dequantize(QuantizedTensor(correct.data, quantized.scale, quantized.granularity, torch.float32))
    # False for the NaN code of a finite number.
    agrees = (y - x.float()).abs() <= TIE * (correct_values - x.float()).abs()
    wide, y = (tensor.double().where(finite, 0.0) for tensor in (x, y))
    squares, magnitudes = wide.square(), wide.abs()
    return {
        "finite": finite.sum(),
        "nonzeros": nonzero.sum(),
        "flushed": flushed.sum(),
        "mismatched": (finite & ~agrees).sum(),
        "energy": squares.sum(),
        "fourth_powers": squares.square().sum(),
        "flushed_energy": squares.where(flushed, 0.0).sum(),
        "noise": (y - wide).square().sum(),
        "product": (wide * y).sum(),
        "decoded_energy": y.square().sum(),
        "magnitude": magnitudes.sum(),
        "signed_error": (wide.sign() * y - magnitudes).where(nonzero, 0.0).sum(),
    }


def cast_numbers(sums: Floats) -> Floats:
    """Convert sums [..., len(CAST_SUMS)] to statistics [..., len(CAST_FIELDS)]."""
    of: Mapping[str, Any] = dict(zip(CAST_SUMS, np.moveaxis(sums, -1, 0), strict=True))
    energy, finite = of["energy"], of["finite"]
    with np.errstate(all="ignore"):
        numbers = {
            "rms": np.sqrt(energy / finite),
            "kurtosis": of["fourth_powers"] * finite / energy**2,
            "zero_fraction": 1 - of["nonzeros"] / finite,
            "saturation_fraction": of["saturated"] / of["elements"],
            "underflow_fraction": of["flushed"] / of["nonzeros"],
            "flushed_energy": of["flushed_energy"] / energy,
            "sqnr_db": _decibels(energy, of["noise"]),
            "cosine": of["product"] / np.sqrt(energy * of["decoded_energy"]),
            "signed_error": of["signed_error"] / of["magnitude"],
            "code_mismatch": of["mismatched"] / finite,
            "least_stale_ratio": np.where(of["least_stale_ratio"] < np.inf, of["least_stale_ratio"], np.nan),
        }
    return np.stack([numbers[name] if name in numbers else of[name] for name in CAST_FIELDS], axis=-1)


def take_rows(quantized: QuantizedTensor, rows: slice) -> QuantizedTensor:
    """Rows of a matrix's codes with their scales.

    Example:
        >>> import octavo
        >>> q = octavo.quantize(torch.eye(4), octavo.E4M3, granularity=octavo.PerBlock(2, 2))
        >>> take_rows(q, slice(3, None, 2)).dequantize()
        tensor([[0., 0., 0., 1.]])
    """
    granularity, scale = quantized.granularity, quantized.scale
    if isinstance(granularity, PerBlock):
        if granularity.rows == 1:
            scale = scale[rows]
        else:
            scale = scale[torch.arange(*rows.indices(quantized.shape[0]), device=scale.device) // granularity.rows]
            granularity = PerBlock(1, granularity.columns)
    elif not isinstance(granularity, PerTensor):
        scale = scale[rows]
    return QuantizedTensor(quantized.data[rows], scale, granularity, quantized.hp_dtype)


def _transpose(quantized: QuantizedTensor) -> QuantizedTensor:
    """Transpose a matrix with its scales: scales of rows become scales of columns."""
    granularity, data = quantized.granularity, quantized.data.t()
    if isinstance(granularity, PerBlock):
        granularity = PerBlock(granularity.columns, granularity.rows)
    elif isinstance(granularity, PerRow):
        granularity = PerBlock(data.shape[0], 1)
    scale = quantized.scale.t() if quantized.scale.ndim == 2 else quantized.scale
    return QuantizedTensor(data, scale, granularity, quantized.hp_dtype)


def product_sums(
    left: QuantizedTensor, right: QuantizedTensor, originals: tuple[Tensor, Tensor], accumulate: Accumulate
) -> Tensor:
    """Sums of the GEMM ``left @ right.T``, as input of :func:`product_numbers`: float64 [len(PRODUCT_SUMS)].

    Args:
        left: [M, K].
        right: [N, K].
        originals: both operands before their casts.
        accumulate: accumulation mode of a Hopper GPU.
    """
    originals, operands = (narrowed(originals[0]), narrowed(originals[1])), (left, right)
    widths = {side.granularity.columns for side in operands if isinstance(side.granularity, PerBlock)}
    if all(native_statistics.sums(*pair) for pair in zip(originals, operands, strict=True)) and len(widths) < 2:
        codes, scales = (left.data, right.data), (rows_of_scales(left), rows_of_scales(right))
        return native_gemm.compare(originals, codes, scales, block=max(widths, default=0), accumulate=accumulate)[1]
    return _product_sums_by_torch(operands, originals, Accumulate.FP32 if widths else accumulate)


@torch.no_grad()
def _product_sums_by_torch(
    operands: tuple[QuantizedTensor, QuantizedTensor], originals: tuple[Tensor, Tensor], accumulate: Accumulate
) -> Tensor:
    """Reference implementation for every device and format."""
    with torch.autocast(operands[0].data.device.type, enabled=False):  # autocast would multiply in its own dtype
        reference = (originals[0].float() @ originals[1].float().t()).double()
    exact = scaled_mm(*operands, out_dtype=torch.float32).double()
    if accumulate is Accumulate.FP32:
        accumulated = torch.full_like(exact, torch.nan)
    else:
        accumulated = scaled_mm(*operands, out_dtype=torch.float32, accumulate=accumulate).double()
    sums = {
        "energy": reference.square(),
        "noise": (exact - reference).square(),
        "magnitude": exact.abs(),
        "signed_error": exact.sign() * (accumulated - exact),
    }
    return torch.stack([sums[name].sum() for name in PRODUCT_SUMS])


def product_numbers(sums: Floats) -> Floats:
    """Convert sums [..., len(PRODUCT_SUMS)] to statistics [..., len(PRODUCT_FIELDS)].

    Example:
        >>> product_numbers(np.array([200.0, 2.0, 22.0, -2.0])).round(3)
        array([20.   , -0.091])
    """
    energy, noise, magnitude, signed_error = np.moveaxis(sums, -1, 0)
    with np.errstate(all="ignore"):
        return np.stack([_decibels(energy, noise), signed_error / magnitude], axis=-1)


def _decibels(signal: Floats, noise: Floats) -> Floats:
    """Ratio in decibels; NaN without noise or without signal."""
    ratio = signal / noise
    return 10 * np.log10(np.where((ratio > 0) & (ratio < np.inf), ratio, np.nan))


def spread(size: int, max_rows: int) -> slice:
    """Select at most ``max_rows`` of ``size`` rows, at least one, an odd number of rows apart.

    Example:
        >>> spread(8, 8), spread(1024, 8)
        (slice(0, None, 1), slice(43, None, 129))
    """
    step = max(1, -(-size // max(1, max_rows))) | 1
    return slice(step // 3, None, step)


def spread_indices(size: int, max_rows: int, device: torch.device) -> Tensor:
    """Indices of :func:`spread` as a tensor."""
    return torch.arange(*spread(size, max_rows).indices(size), device=device)

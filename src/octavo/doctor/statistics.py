"""What the doctor measures of one tensor, beside the codes that were made of it, and of one GEMM.

A cast is judged by several numbers because each is blind somewhere: the SQNR does not see underflow, underflow does
not see saturation, and neither sees codes that belong to another tensor.

| field               | meaning                                                                       | of            |
|---------------------|-------------------------------------------------------------------------------|---------------|
| amax                | largest finite magnitude                                                      | all elements  |
| nonfinite           | NaN and ±Inf elements, before the cast                                        | all elements  |
| saturation_fraction | beyond the largest value that the scale provides for                          | all elements  |
| stale_ratio         | g = amax now / amax the scale was made for, the largest of all scaling groups | all elements  |
| least_stale_ratio   | the smallest g of scaling groups whose amax is above ten times the floor      | all elements  |
| scale               | decode scale, the largest of all scaling groups                               | all groups    |
| rms                 | sqrt(mean x²)                                                                 | sampled rows  |
| kurtosis            | mean x⁴ / (mean x²)²: 3 for a Gaussian                                        | sampled rows  |
| zero_fraction       | x = 0                                                                         | sampled rows  |
| underflow_fraction  | code 0 of nonzeros                                                            | sampled rows  |
| flushed_energy      | share of Σ x² in them                                                         | sampled rows  |
| sqnr_db             | 10·log10(Σ x² / Σ (y - x)²)                                                   | sampled rows  |
| cosine              | Σ x·y / sqrt(Σ x² · Σ y²)                                                     | sampled rows  |
| signed_error        | Σ sign(x)·(y - x) / Σ |x|                                                     | sampled rows  |
| code_mismatch       | codes that are farther from x than those of x under this scale                | sampled rows  |

x is the tensor in high precision and y what its codes decode to. Sums run over finite elements, in FP64. A number that
does not exist (the SQNR of an exact cast, the kurtosis of zeros) is NaN.

While a step runs only sums are made, on the tensors' device and without waiting for it: a cast's CAST_SUMS, which on a
CPU are a native kernel's, and a GEMM's PRODUCT_SUMS. Numbers come from them once the step is over.

Sampled rows are an odd number of rows apart: tokens lie sequence after sequence, and an even step would often meet all
of them at the same position, the first ones and their outliers for instance. Of a transposed view, whose columns lie
side by side, columns are sampled.

A GEMM is judged on sampled rows of both operands, in two numbers: the SQNR of its result against high precision, and
the bias of its sums on a Hopper tensor core, Σ sign(f)·(h - f) / Σ |f| with f summed in FP32 and h as the recipe's
``accumulate`` says; NaN where scales change along K.
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
    "cast_statistics",
    "cast_sums",
    "evenly",
    "product_numbers",
    "product_sums",
    "spread",
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
    *("finite", "nonzeros", "flushed", "mismatched"),  # of sampled rows, as all that follow
    *("energy", "fourth_powers", "flushed_energy", "noise", "product", "decoded_energy", "magnitude", "signed_error"),
    "least_stale_ratio",  # of all elements, and not one of the kernel's
)
PRODUCT_FIELDS = ("sqnr_db", "accumulation_bias")
PRODUCT_SUMS = ("energy", "noise", "magnitude", "signed_error")  # in the order of native/comparison.h
SAMPLED_ELEMENTS = 1 << 14
TIE = (
    1.001  # x · encode_scale and x / scale may differ in the last bit, which decides where x lies halfway (cast_sums.h)
)
Floats = NDArray[np.float64]


def cast_statistics(x: Tensor, made: QuantizedTensor, *, amax_floor: float = AMAX_FLOOR) -> Tensor:
    """The numbers of one cast: float64 [len(CAST_FIELDS)] on the CPU.

    Args:
        x: [M, K] as it was before the cast, not empty.
        made: its codes and scales.
        amax_floor: as which smaller amaxes counted when the scales were made.

    Example:
        >>> import octavo
        >>> x = torch.tensor([[3.0, -4.0, 0.0, 1e-6]])
        >>> numbers = dict(zip(CAST_FIELDS, cast_statistics(x, octavo.quantize(x, octavo.E4M3)).tolist()))
        >>> numbers["amax"], numbers["stale_ratio"], numbers["zero_fraction"], round(numbers["underflow_fraction"], 2)
        (4.0, 1.0, 0.25, 0.33)
    """
    return torch.from_numpy(cast_numbers(cast_sums(x, made, amax_floor=amax_floor).cpu().numpy()))


def cast_sums(x: Tensor, made: QuantizedTensor, *, amax_floor: float = AMAX_FLOOR) -> Tensor:
    """What :func:`cast_numbers` needs of one cast: float64 [len(CAST_SUMS)] on ``x``'s device.

    Args:
        x: [M, K] as it was before the cast, not empty.
        made: its codes and scales.
        amax_floor: as which smaller amaxes counted when the scales were made.
    """
    turned = is_transposed(x)
    size, other = x.shape[::-1] if turned else x.shape
    rows = spread(size, SAMPLED_ELEMENTS // other)
    if native_statistics.sums(x, made):
        return native_statistics.cast_sums(x, made, rows, amax_floor=amax_floor)
    if turned:
        x, made = x.t(), _transposed(made)
    return _sums_by_torch(x, made, rows, amax_floor=amax_floor)


@torch.no_grad()
def _sums_by_torch(x: Tensor, made: QuantizedTensor, rows: slice, *, amax_floor: float) -> Tensor:
    """The definition, for every device and format."""
    x, scale = narrowed(x.detach()), made.fp32_scale
    found = measure(x, made.granularity)
    whole = {
        "elements": torch.full((), x.numel(), device=x.device),
        "nonfinite": torch.zeros((), device=x.device) if found.nonfinite is None else found.nonfinite,
        "saturated": _saturated(x, made, found.amax),
        "amax": found.amax.amax(),
        "scale": scale.amax(),
        "stale_ratio": (found.amax / (scale * made.format.max)).amax(),
        "least_stale_ratio": native_statistics.least_stale_ratio(found.amax, scale, made.format, amax_floor=amax_floor),
    }
    sums = whole | _sampled_sums(x[rows], take_rows(made, rows))
    return torch.stack([sums[name].double() for name in CAST_SUMS])


def _saturated(x: Tensor, made: QuantizedTensor, amaxes: Tensor) -> Tensor:
    """How many finite elements lie beyond what their scale provides for."""
    limit = saturation_amax(made)
    if is_eager_cpu(x) and not (amaxes > limit).any():
        return torch.zeros((), device=x.device)
    highest = limit.float()  # rounded down: a 16-bit element would be compared in 16 bits with a float64 scalar
    highest = torch.where(highest > limit, highest.nextafter(torch.zeros_like(highest)), highest)
    magnitudes = x.float().abs()
    return ((magnitudes > made.granularity.expand(highest, x.shape)) & (magnitudes < torch.inf)).sum()


def _sampled_sums(x: Tensor, made: QuantizedTensor) -> dict[str, Tensor]:
    again = quantize(x, made.format, granularity=made.granularity, scale=made.fp32_scale)
    codes = made.data.view(torch.uint8)
    y = dequantize(QuantizedTensor(made.data, made.scale, made.granularity, torch.float32))
    finite = x.isfinite()
    nonzero = finite & (x != 0)
    flushed = nonzero & (codes & 0x7F == 0)
    wanted = dequantize(QuantizedTensor(again.data, made.scale, made.granularity, torch.float32))
    agrees = (y - x.float()).abs() <= TIE * (wanted - x.float()).abs()  # a NaN code of a number does not
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
    """[..., len(CAST_SUMS)] to [..., len(CAST_FIELDS)]."""
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


def take_rows(made: QuantizedTensor, rows: slice) -> QuantizedTensor:
    """Some rows of a matrix's codes with the scales that decode them.

    Example:
        >>> import octavo
        >>> q = octavo.quantize(torch.eye(4), octavo.E4M3, granularity=octavo.PerBlock(2, 2))
        >>> take_rows(q, slice(3, None, 2)).dequantize()
        tensor([[0., 0., 0., 1.]])
    """
    granularity, scale = made.granularity, made.scale
    if isinstance(granularity, PerBlock):
        if granularity.rows == 1:
            scale = scale[rows]
        else:
            scale = scale[torch.arange(*rows.indices(made.shape[0]), device=scale.device) // granularity.rows]
            granularity = PerBlock(1, granularity.columns)
    elif not isinstance(granularity, PerTensor):
        scale = scale[rows]
    return QuantizedTensor(made.data[rows], scale, granularity, made.hp_dtype)


def _transposed(made: QuantizedTensor) -> QuantizedTensor:
    """The transpose with the scales it has: those of a row are then those of a column."""
    granularity, data = made.granularity, made.data.t()
    if isinstance(granularity, PerBlock):
        granularity = PerBlock(granularity.columns, granularity.rows)
    elif isinstance(granularity, PerRow):
        granularity = PerBlock(data.shape[0], 1)
    scale = made.scale.t() if made.scale.ndim == 2 else made.scale
    return QuantizedTensor(data, scale, granularity, made.hp_dtype)


def product_sums(
    left: QuantizedTensor, right: QuantizedTensor, originals: tuple[Tensor, Tensor], accumulate: Accumulate
) -> Tensor:
    """What :func:`product_numbers` needs of ``left @ right.T``: float64 [len(PRODUCT_SUMS)] on the operands' device.

    Args:
        left: [M, K].
        right: [N, K].
        originals: what they were made of.
        accumulate: how a Hopper GPU would sum it.
    """
    originals, made = (narrowed(originals[0]), narrowed(originals[1])), (left, right)
    widths = {side.granularity.columns for side in made if isinstance(side.granularity, PerBlock)}
    if all(native_statistics.sums(*pair) for pair in zip(originals, made, strict=True)) and len(widths) < 2:
        codes, scales = (left.data, right.data), (rows_of_scales(left), rows_of_scales(right))
        return native_gemm.compare(originals, codes, scales, block=max(widths, default=0), accumulate=accumulate)[1]
    return _product_sums_by_torch(made, originals, Accumulate.FP32 if widths else accumulate)


@torch.no_grad()
def _product_sums_by_torch(
    made: tuple[QuantizedTensor, QuantizedTensor], originals: tuple[Tensor, Tensor], accumulate: Accumulate
) -> Tensor:
    """The definition, for every device and format."""
    with torch.autocast(made[0].data.device.type, enabled=False):  # which would multiply in its own dtype
        wanted = (originals[0].float() @ originals[1].float().t()).double()
    exact = scaled_mm(*made, out_dtype=torch.float32).double()
    if accumulate is Accumulate.FP32:
        cut = torch.full_like(exact, torch.nan)
    else:
        cut = scaled_mm(*made, out_dtype=torch.float32, accumulate=accumulate).double()
    sums = {
        "energy": wanted.square(),
        "noise": (exact - wanted).square(),
        "magnitude": exact.abs(),
        "signed_error": exact.sign() * (cut - exact),
    }
    return torch.stack([sums[name].sum() for name in PRODUCT_SUMS])


def product_numbers(sums: Floats) -> Floats:
    """[..., len(PRODUCT_SUMS)] to [..., len(PRODUCT_FIELDS)].

    Example:
        >>> product_numbers(np.array([200.0, 2.0, 22.0, -2.0])).round(3)
        array([20.   , -0.091])
    """
    energy, noise, magnitude, signed_error = np.moveaxis(sums, -1, 0)
    with np.errstate(all="ignore"):
        return np.stack([_decibels(energy, noise), signed_error / magnitude], axis=-1)


def _decibels(signal: Floats, noise: Floats) -> Floats:
    """NaN where there is no noise or no signal: an exact cast has no ratio."""
    ratio = signal / noise
    return 10 * np.log10(np.where((ratio > 0) & (ratio < np.inf), ratio, np.nan))


def spread(size: int, most: int) -> slice:
    """At most ``most`` of ``size`` rows, and one at least, an odd number of rows apart.

    Example:
        >>> spread(8, 8), spread(1024, 8)
        (slice(0, None, 1), slice(43, None, 129))
    """
    step = max(1, -(-size // max(1, most))) | 1
    return slice(step // 3, None, step)


def evenly(size: int, most: int, device: torch.device) -> Tensor:
    """The indices of :func:`spread`."""
    return torch.arange(*spread(size, most).indices(size), device=device)

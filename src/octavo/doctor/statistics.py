"""What the doctor measures of one tensor, beside the codes that were made of it, and of one GEMM.

A cast is judged by several numbers because each is blind somewhere: the SQNR does not see underflow, underflow does
not see saturation, and neither sees codes that belong to another tensor.

| field               | meaning                                                                       | of            |
|---------------------|-------------------------------------------------------------------------------|---------------|
| amax                | largest finite magnitude                                                      | all elements  |
| nonfinite           | NaN and ±Inf elements, before the cast                                        | all elements  |
| saturation_fraction | beyond the largest value that the scale provides for                          | all elements  |
| stale_ratio         | g = amax now / amax the scale was made for, the largest of all scaling groups | all elements  |
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

x is the tensor in high precision and y what its codes decode to. Sums run over finite elements. A number that does not
exist (the SQNR of an exact cast, the kurtosis of zeros) is NaN.

A GEMM is judged on sampled rows of both operands, in two numbers: the SQNR of its result against high precision, and
the bias of its sums on a Hopper tensor core, Σ sign(f)·(h - f) / Σ |f| with f summed in FP32 and h as the recipe's
``accumulate`` says; NaN where scales change along K.
"""

import torch
from torch import Tensor

from octavo.kernels import quantize, scaled_mm
from octavo.numerics import Accumulate, PerBlock, PerTensor, QuantizedTensor, measure
from octavo.numerics.cast import can_be_asked
from octavo.numerics.metrics import saturation_amax, saturation_limit

__all__ = ["CAST_FIELDS", "PRODUCT_FIELDS", "cast_statistics", "evenly", "product_statistics", "take_rows"]

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
)
PRODUCT_FIELDS = ("sqnr_db", "accumulation_bias")
SAMPLED_ELEMENTS = 1 << 15
TIE = 1.001  # x · encode_scale and x / scale may differ in the last bit, which decides where x lies halfway


@torch.no_grad()
def cast_statistics(x: Tensor, made: QuantizedTensor) -> Tensor:
    """The numbers of one cast: float64 [len(CAST_FIELDS)] on ``x``'s device, without waiting for it.

    Args:
        x: [M, K] as it was before the cast.
        made: its codes and scales.

    Example:
        >>> import octavo
        >>> x = torch.tensor([[3.0, -4.0, 0.0, 1e-6]])
        >>> numbers = dict(zip(CAST_FIELDS, cast_statistics(x, octavo.quantize(x, octavo.E4M3)).tolist()))
        >>> numbers["amax"], numbers["stale_ratio"], numbers["zero_fraction"], round(numbers["underflow_fraction"], 2)
        (4.0, 1.0, 0.25, 0.33)
    """
    found = measure(x, made.granularity)
    provided, amax = made.fp32_scale * made.format.max, found.amax.amax()
    rows = evenly(x.shape[0], max(1, SAMPLED_ELEMENTS // max(1, x.shape[1])), x.device)
    whole = {
        "amax": amax,
        "nonfinite": torch.zeros((), device=x.device) if found.nonfinite is None else found.nonfinite,
        "saturation_fraction": _saturated(x, made, found.amax) / max(1, x.numel()),
        "scale": made.fp32_scale.amax(),
        "stale_ratio": (found.amax / provided).amax(),
    }
    sampled = _of_sample(x[rows].float(), take_rows(made, rows), amax, may_be_broken=found.nonfinite is not None)
    return torch.stack([(whole | sampled)[name].float() for name in CAST_FIELDS]).double()


def _saturated(x: Tensor, made: QuantizedTensor, amaxes: Tensor) -> Tensor:
    """How many finite elements lie beyond what their scale provides for."""
    if can_be_asked(x) and not (amaxes > saturation_amax(made)).any():
        return torch.zeros((), device=x.device)
    magnitudes = x.abs()
    return ((magnitudes > saturation_limit(made)) & (magnitudes < torch.inf)).sum()


def _of_sample(x: Tensor, made: QuantizedTensor, amax: Tensor, *, may_be_broken: bool) -> dict[str, Tensor]:
    again = quantize(x, made.format, granularity=made.granularity, scale=made.fp32_scale)
    x, y, wanted = x.flatten(), _decoded(made), _decoded(again)
    mismatches = ~((y - x).abs() <= TIE * (wanted - x).abs())  # a NaN code of a number is one too
    count = torch.full((), x.numel(), device=x.device)
    if may_be_broken:
        finite = x.isfinite()
        x, y, count = x.where(finite, 0.0), y.where(finite, 0.0), finite.sum()
        mismatches &= finite
    unit = torch.where(amax > 0, amax, 1.0)  # so that no fourth power leaves FP32's range
    x, y = x / unit, y / unit
    squares, error, flushed_or_zero = x * x, y - x, (y == 0).float()
    nonzero, energy = torch.count_nonzero(x), squares.sum()
    flushed = flushed_or_zero.sum() - (x.numel() - nonzero)
    return {
        "rms": (energy / count).sqrt() * unit,
        "kurtosis": torch.dot(squares, squares) * count / energy.square(),
        "zero_fraction": (count - nonzero) / count,
        "underflow_fraction": flushed / nonzero,
        "flushed_energy": torch.dot(squares, flushed_or_zero) / energy,
        "sqnr_db": _decibels(energy, torch.dot(error, error)),
        "cosine": torch.dot(x, y) / (energy * torch.dot(y, y)).sqrt(),
        "signed_error": torch.dot(x.sign(), error) / x.abs().sum(),
        "code_mismatch": torch.count_nonzero(mismatches) / count,
    }


def _decoded(made: QuantizedTensor) -> Tensor:
    return QuantizedTensor(made.data, made.scale, made.granularity, torch.float32).dequantize().flatten()


def take_rows(made: QuantizedTensor, rows: Tensor) -> QuantizedTensor:
    """Some rows of a matrix's codes with the scales that decode them.

    Example:
        >>> import octavo
        >>> q = octavo.quantize(torch.eye(4), octavo.E4M3, granularity=octavo.PerBlock(2, 2))
        >>> take_rows(q, torch.tensor([3])).dequantize()
        tensor([[0., 0., 0., 1.]])
    """
    data, granularity, scale = made.data[rows], made.granularity, made.scale
    if isinstance(granularity, PerBlock):
        scale, granularity = scale[rows // granularity.rows], PerBlock(1, granularity.columns)
    elif not isinstance(granularity, PerTensor):
        scale = scale[rows]
    return QuantizedTensor(data, scale, granularity, made.hp_dtype)


@torch.no_grad()
def product_statistics(left: QuantizedTensor, right: QuantizedTensor, wanted: Tensor, accumulate: Accumulate) -> Tensor:
    """The numbers of ``left @ right.T``: float64 [len(PRODUCT_FIELDS)].

    Args:
        left: [M, K].
        right: [N, K].
        wanted: [M, N], the product of what they were made of.
        accumulate: how a Hopper GPU would sum it.
    """
    exact = scaled_mm(left, right, out_dtype=torch.float32)
    sqnr_db = _decibels(wanted.square().sum(), (exact - wanted).square().sum())
    if accumulate is Accumulate.FP32 or any(isinstance(side.granularity, PerBlock) for side in (left, right)):
        return torch.stack([sqnr_db, torch.full_like(sqnr_db, torch.nan)]).double()
    cut = scaled_mm(left, right, out_dtype=torch.float32, accumulate=accumulate)
    return torch.stack([sqnr_db, (exact.sign() * (cut - exact)).sum() / exact.abs().sum()]).double()


def _decibels(signal: Tensor, noise: Tensor) -> Tensor:
    """NaN where there is no noise: an exact cast has no ratio."""
    return torch.where(noise > 0, 10 * torch.log10(signal / noise), torch.nan)


def evenly(size: int, most: int, device: torch.device) -> Tensor:
    """At most ``most`` indices below ``size``, evenly spread."""
    return torch.arange(min(size, most), device=device) * size // max(1, min(size, most))

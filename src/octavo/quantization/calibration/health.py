"""Health of each layer's input scale on the calibration data, and warnings.

Everything is computed from the histogram of magnitudes and the scale, without running the model again. A bin is 1/64
binade wide, so shares are exact except for elements within that distance of a limit, and the SQNR is exact to about
0.1 dB unless a few elements have most of the energy.

Harmless conditions give no warning: an outlier costs nothing until amax / rms reaches 2^13, and values flushed to zero
cost nothing if their energy is far below that of FP8's rounding. If most values are flushed, clipping the outliers
loses more than it gains; a scale per row or block, or BF16 for that layer, preserves both.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from octavo.doctor.thresholds import Thresholds
from octavo.formats import Format
from octavo.quantization.calibration.magnitude_histogram import Magnitudes
from octavo.quantization.calibration.ranges import decoded

__all__ = ["FEW_SAMPLES", "MOVED", "LayerHealth", "health_of", "health_warnings"]

FEW_SAMPLES = 32  # sequences
MOVED = 0.1  # of a scale, by the last quarter of the samples
_THRESHOLDS = Thresholds()
_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerHealth:
    """Quality of a layer's input under its scale; a dB without noise, or a value not measured, is None.

    Attributes:
        path: path of the layer.
        amax: largest magnitude observed.
        scale: decode scale.
        sqnr_db: signal-to-quantization-noise ratio.
        underflow_fraction: share of the nonzero elements that become zero.
        flushed_energy: their share of Σ x².
        clipped_fraction: share of the elements beyond the representable range.
        clipped_energy: their share of Σ x².
        peak: amax over rms.
        moved: relative change of the scale by the last quarter of the batches; 1 if no earlier batch reached the
            layer. Several ranks together do not measure it.
        weight_sqnr_db: SQNR of the weight under its own scales.
        tokens: how many tokens an expert's layer received; None for other layers.
        borrowed: whether these were too few, so that the scale is the largest of the other experts'.
    """

    path: str
    amax: float
    scale: float
    sqnr_db: float | None = None
    underflow_fraction: float | None = None
    flushed_energy: float | None = None
    clipped_fraction: float | None = None
    clipped_energy: float | None = None
    peak: float | None = None
    moved: float | None = None
    weight_sqnr_db: float | None = None
    tokens: int | None = None
    borrowed: bool = False


def health_of(
    path: str,
    magnitudes: Magnitudes,
    scale: Tensor,
    fmt: Format,
    *,
    early_scale: float | None = None,
    weight_sqnr_db: float | None = None,
) -> LayerHealth:
    """Compute the health of one layer's input.

    Args:
        path: path of the layer.
        magnitudes: of its input.
        scale: decode scale, float32 [].
        fmt: the format.
        early_scale: scale without the last quarter of the batches; 0 if only those reached the layer.
        weight_sqnr_db: stored in the result.

    Example:
        >>> from octavo.formats import E4M3
        >>> from octavo.quantization.calibration.magnitude_histogram import MagnitudeCounts
        >>> counts = MagnitudeCounts()
        >>> counts.add(torch.tensor([448.0, 2.0**-12, 0.0, 1.0]))
        >>> health = health_of("layer", counts.magnitudes(), torch.tensor(1.0), E4M3)
        >>> health.amax, round(health.underflow_fraction, 2), health.clipped_fraction
        (448.0, 0.33, 0.0)
    """
    decoded_values = decoded(magnitudes.values, scale[None], fmt)[0]
    energies = magnitudes.counts * magnitudes.values.square()
    noise = float((magnitudes.counts * (magnitudes.values - decoded_values).square()).sum())
    nonzero, clipped = magnitudes.values > 0, magnitudes.values > _limit(scale, fmt)
    return LayerHealth(
        path=path,
        amax=magnitudes.amax,
        scale=float(scale),
        sqnr_db=10 * math.log10(magnitudes.energy / noise) if noise else None,
        underflow_fraction=_share(magnitudes.counts, nonzero & (decoded_values == 0), nonzero),
        flushed_energy=_share(energies, decoded_values == 0),
        clipped_fraction=_share(magnitudes.counts, clipped),
        clipped_energy=_share(energies, clipped),
        peak=magnitudes.amax / magnitudes.rms if magnitudes.rms else 0.0,
        moved=_moved(float(scale), early_scale),
        weight_sqnr_db=weight_sqnr_db,
    )


def health_warnings(layers: Iterable[LayerHealth], *, samples: int | None) -> Iterator[str]:
    """Yield a sentence for each problem.

    Args:
        layers: of one calibration.
        samples: number of calibration samples; None if unknown.
    """
    if samples is not None and samples < FEW_SAMPLES:
        yield f"{samples} samples are few: calibrate on {FEW_SAMPLES} or more, of all kinds of text that will be served"
    layers = list(layers)
    flushed = [each for each in layers if _flushes_too_much(each)]
    if flushed:
        yield (
            f"small values of {_worst(flushed, 'underflow_fraction')} become zero; clipping would not help: give these "
            "layers a finer granularity (rowwise, blockwise) or leave them in BF16"
        )
    clipped = [each for each in layers if each.clipped_fraction and (each.sqnr_db or 0.0) < _THRESHOLDS.healthy_cast_db]
    if clipped:
        worst = min(clipped, key=lambda each: each.sqnr_db or 0.0)
        yield (
            f"clipping costs {_worst(clipped, 'clipped_energy')} of their energy, down to {worst.sqnr_db:.1f} dB, "
            f"where FP8 gives {_THRESHOLDS.healthy_cast_db:g} and more; use the method max"
        )
    if starved := _starved_experts(layers):
        yield starved
    moving = [each for each in layers if (each.moved or 0.0) > MOVED]
    if moving:
        yield f"the last quarter of the samples still moved the scale of {_worst(moving, 'moved')}; calibrate on more"


def _starved_experts(layers: list[LayerHealth]) -> str:
    """Sentence about experts that too few tokens reached, those with the fewest first; empty if there are none."""
    tokens = {each.path.rpartition(".")[0]: each.tokens or 0 for each in layers if each.borrowed}
    fewest = sorted(tokens, key=lambda path: tokens[path])
    if not fewest:
        return ""
    names = ", ".join(f"{path!r} ({tokens[path]})" for path in fewest[:_SHOWN])
    more = f" and {len(fewest) - _SHOWN} more experts" if len(fewest) > _SHOWN else ""
    return (
        f"too few tokens reached {names}{more}: they have the largest scale of the other experts in their layer; "
        "calibrate on more text"
    )


def _moved(scale: float, early: float | None) -> float | None:
    if early is None:
        return None
    return abs(scale / early - 1) if early else 1.0


def _flushes_too_much(layer: LayerHealth) -> bool:
    """Report whether most nonzero values are flushed, or some with more energy than rounding would lose."""
    fraction, energy = layer.underflow_fraction or 0.0, layer.flushed_energy or 0.0
    harmful = fraction > _THRESHOLDS.underflow_fraction and energy > _THRESHOLDS.harmless_flush
    return harmful or fraction > _THRESHOLDS.underflow_fraction_fail


def _worst(layers: list[LayerHealth], by: str) -> str:
    """Format the worst layers with their values of attribute ``by``, the worst first."""
    worst = sorted(layers, key=lambda each: getattr(each, by), reverse=True)
    names = ", ".join(f"{each.path!r} ({getattr(each, by):.1%})" for each in worst[:_SHOWN])
    more = len(worst) - _SHOWN
    return f"{names} and {more} more layers" if more > 0 else names


def _limit(scale: Tensor, fmt: Format) -> float:
    """Largest magnitude that does not saturate, including those that round to the maximum."""
    half_step = (fmt.max - fmt.magnitude(fmt.max_code - 1)) / 2
    return float(scale) * (fmt.max + half_step)


def _share(amounts: Tensor, part: Tensor, of: Tensor | None = None) -> float:
    total = float(amounts.sum() if of is None else amounts[of].sum())
    return float(amounts[part].sum()) / total if total else 0.0

"""How well an input's scale fits what calibration saw of it, layer by layer, and what deserves a warning.

All of it follows from the histogram of magnitudes and the scale; nothing is run twice. Bins are a 64th of a binade
wide, so shares are right but for elements within that distance of a limit, and the SQNR to about 0.1 dB unless a few
elements have most of the energy.

What is no fault is not warned of: one outlier costs nothing until amax / rms reaches 2^13, and values that are flushed
to zero cost nothing where their energy is far below that of FP8's own rounding. Where the bulk is flushed, clipping the
outliers loses more than it saves; a scale a row or a block, or BF16 for that layer, keeps both.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from octavo.doctor.thresholds import Thresholds
from octavo.formats import Format
from octavo.quantization.calibration.magnitudes import Magnitudes
from octavo.quantization.calibration.ranges import decoded

__all__ = ["FEW_SAMPLES", "MOVED", "LayerHealth", "health_of", "health_warnings"]

FEW_SAMPLES = 32  # sequences
MOVED = 0.1  # of a scale, by the last quarter of the samples
_THRESHOLDS = Thresholds()
_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerHealth:
    """A layer's input under its scale. What a training run's history does not tell is None, and the dB of no noise.

    Attributes:
        path: the layer's.
        amax: the largest magnitude seen.
        scale: decodes.
        sqnr_db: signal to quantisation noise.
        underflow_fraction: share of the nonzeros that become zero.
        flushed_energy: their share of Σ x².
        clipped_fraction: share of the elements beyond what the scale provides for.
        clipped_energy: their share of Σ x².
        peak: amax over rms.
        moved: how much the last quarter of the batches changed the scale, relative to the one before; 1 where no
            batch before reached the layer.
        weight_sqnr_db: of the weight under its own scales.
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


def health_of(
    path: str,
    seen: Magnitudes,
    scale: Tensor,
    fmt: Format,
    *,
    early_scale: float | None = None,
    weight_sqnr_db: float | None = None,
) -> LayerHealth:
    """The health of one layer's input.

    Args:
        path: the layer's.
        seen: its input's magnitudes.
        scale: float32 [], decodes.
        fmt: the format.
        early_scale: the scale without the last quarter of the batches; 0 where those alone reached the layer.
        weight_sqnr_db: handed on.

    Example:
        >>> from octavo.formats import E4M3
        >>> from octavo.quantization.calibration.magnitudes import MagnitudeCounts
        >>> counts = MagnitudeCounts()
        >>> counts.add(torch.tensor([448.0, 2.0**-12, 0.0, 1.0]))
        >>> found = health_of("layer", counts.magnitudes(), torch.tensor(1.0), E4M3)
        >>> found.amax, round(found.underflow_fraction, 2), found.clipped_fraction
        (448.0, 0.33, 0.0)
    """
    found = decoded(seen.values, scale[None], fmt)[0]
    energies = seen.counts * seen.values.square()
    noise = float((seen.counts * (seen.values - found).square()).sum())
    nonzero, clipped = seen.values > 0, seen.values > _limit(scale, fmt)
    return LayerHealth(
        path=path,
        amax=seen.amax,
        scale=float(scale),
        sqnr_db=10 * math.log10(seen.energy / noise) if noise else None,
        underflow_fraction=_share(seen.counts, nonzero & (found == 0), nonzero),
        flushed_energy=_share(energies, found == 0),
        clipped_fraction=_share(seen.counts, clipped),
        clipped_energy=_share(energies, clipped),
        peak=seen.amax / seen.rms if seen.rms else 0.0,
        moved=_moved(float(scale), early_scale),
        weight_sqnr_db=weight_sqnr_db,
    )


def health_warnings(layers: Iterable[LayerHealth], *, samples: int | None) -> Iterator[str]:
    """A sentence for each thing that deserves one; none where all is well.

    Args:
        layers: of one calibration.
        samples: how many were seen; None where nobody counted.
    """
    if samples is not None and samples < FEW_SAMPLES:
        yield f"{samples} samples are few: calibrate on {FEW_SAMPLES} or more, of all kinds of text that will be served"
    layers = list(layers)
    flushed = [each for each in layers if _loses_its_bulk(each)]
    if flushed:
        yield (
            f"small values of {_named(flushed, 'underflow_fraction')} become zero; clipping would not help: give these "
            "layers a finer granularity (rowwise, blockwise) or leave them in BF16"
        )
    clipped = [each for each in layers if each.clipped_fraction and (each.sqnr_db or 0.0) < _THRESHOLDS.healthy_cast_db]
    if clipped:
        worst = min(clipped, key=lambda each: each.sqnr_db or 0.0)
        yield (
            f"clipping costs {_named(clipped, 'clipped_energy')} of their energy, down to {worst.sqnr_db:.1f} dB, "
            f"where FP8 gives {_THRESHOLDS.healthy_cast_db:g} and more; use the method max"
        )
    moving = [each for each in layers if (each.moved or 0.0) > MOVED]
    if moving:
        yield f"the last quarter of the samples still moved the scale of {_named(moving, 'moved')}; calibrate on more"


def _moved(scale: float, early: float | None) -> float | None:
    if early is None:
        return None
    return abs(scale / early - 1) if early else 1.0


def _loses_its_bulk(layer: LayerHealth) -> bool:
    """Whether most nonzeros are flushed, or some and with energy that rounding would not have cost."""
    fraction, energy = layer.underflow_fraction or 0.0, layer.flushed_energy or 0.0
    harmful = fraction > _THRESHOLDS.underflow_fraction and energy > _THRESHOLDS.harmless_flush
    return harmful or fraction > _THRESHOLDS.underflow_fraction_fail


def _named(layers: list[LayerHealth], by: str) -> str:
    """The first few layers, the worst first, with their numbers."""
    worst = sorted(layers, key=lambda each: getattr(each, by), reverse=True)
    names = ", ".join(f"{each.path!r} ({getattr(each, by):.1%})" for each in worst[:_SHOWN])
    rest = len(worst) - _SHOWN
    return f"{names} and {rest} more layers" if rest > 0 else names


def _limit(scale: Tensor, fmt: Format) -> float:
    """Larger magnitudes saturate; one that merely rounds to the maximum does not."""
    half_step = (fmt.max - fmt.magnitude(fmt.max_code - 1)) / 2
    return float(scale) * (fmt.max + half_step)


def _share(amounts: Tensor, part: Tensor, whole: Tensor | None = None) -> float:
    total = float(amounts.sum() if whole is None else amounts[whole].sum())
    return float(amounts[part].sum()) / total if total else 0.0

"""Rules for values outside the format's range: saturation, underflow, and tensors of zeros."""

from collections.abc import Iterator, Sequence

import numpy as np

from octavo.doctor.findings import Finding, Severity
from octavo.doctor.rules.tracks import Track, length, longest, tracks
from octavo.doctor.series import Series
from octavo.doctor.tables import Floats
from octavo.doctor.thresholds import Thresholds

__all__ = ["bulk_underflow", "gradient_underflow", "saturation", "zero_tensor"]

READERS = {"input": ("output", "grad_weight"), "weight": ("output", "grad_input")}  # GEMMs that read each role


def saturation(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find elements beyond the range of the scale in consecutive samples.

    Three samples with more than ``saturation_fraction`` of the elements.

    Delayed scales are left to :func:`stale_scale`: they clip a few elements whenever their tensor grows.
    """
    for track in tracks(series):
        fraction = track.of("saturation_fraction")
        where = longest(fraction > limits.saturation_fraction)
        if track.spec("scaling") == "delayed" or length(where) < limits.persistent_looks:
            continue
        worst, g = fraction[where].max(), track.growth[where].max()
        yield track.finding(
            where,
            "saturation",
            Severity.FAIL if g >= limits.stale_ratio_fail else Severity.WARN,
            cause=f"{worst:.2%} of the elements exceed the largest value that the scale represents, by up to {g:.2g}x",
            weight=worst,
            saturation_fraction=worst,
            stale_ratio=g,
        )


def gradient_underflow(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find gradients of which many nonzero elements become zero, a loss that the SQNR does not show.

    Three samples in which ``underflow_fraction`` of the nonzeros become zero.
    """
    for track in tracks(series):
        if track.key.role == "grad_output":
            yield from _underflow(track, limits, "gradient-underflow", "small gradients")


def bulk_underflow(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find inputs and weights whose largest elements set a scale under which many others become zero.

    Three samples in which ``underflow_fraction`` of the nonzeros become zero.

    The severity is one degree lower if the lost elements have negligible energy and the GEMMs stay accurate, as for the
    smallest outputs of a softmax; but at least a warning if most elements are lost, since a few rows that outweigh all
    others keep every sum of squares healthy.
    """
    for track in tracks(series):
        if track.key.role != "grad_output":
            yield from _underflow(track, limits, "bulk-underflow", "the bulk", series)


def _gemm_sqnrs(track: Track, where: slice, series: Series) -> list[Floats]:
    """SQNR in dB of each GEMM that reads the cast's result, in the samples that have it."""
    table = series.products
    is_selected = np.isin(table.steps, track.steps[where])
    ratios = [
        table.of("sqnr_db")[is_selected, column]
        for column, key in enumerate(table.keys)
        if key.path == track.key.path and key.gemm in READERS[track.key.role]
    ]
    return [known for values in ratios if (known := values[np.isfinite(values)]).size]


def _underflow(
    track: Track, limits: Thresholds, code: str, what: str, series: Series | None = None
) -> Iterator[Finding]:
    lost = track.of("underflow_fraction")
    where = longest(lost >= limits.underflow_fraction)
    if length(where) < limits.persistent_looks:
        return
    worst, energy = lost[where].max(), track.of("flushed_energy")[where].max()
    peaks = (track.of("amax") / track.of("rms"))[where]
    peak = peaks[np.isfinite(peaks)].max(initial=0.0)
    sqnr = track.of("sqnr_db")[where].min()
    loses_most = worst >= limits.underflow_fraction_fail
    severity, energy_note = Severity.FAIL if loses_most else Severity.WARN, ""
    gemms = [] if series is None else _gemm_sqnrs(track, where, series)
    if energy <= limits.harmless_flush and sqnr >= limits.healthy_cast_db and _are_healthy(gemms, limits):
        severity, energy_note = (
            Severity.WARN if loses_most else Severity.NOTE,
            f"; they carried {energy:.2g} of the energy",
        )
    worst_sample = where.start + int(lost[where].argmax())
    is_below_floor = bool(track.is_below_floor[worst_sample])
    why = _cause_by_floor(track, worst_sample) if is_below_floor else _cause_by_range(track, peak, what)
    yield track.finding(
        where,
        code,
        severity,
        cause=f"{worst:.0%} of the nonzero elements become zero: {why}{energy_note}",
        weight=worst,
        underflow_fraction=worst,
        flushed_energy=energy,
        sqnr_db=sqnr,
        peak=peak,
        amax_floor=track.amax_floor if is_below_floor else np.nan,
    )


def _cause_by_range(track: Track, peak: float, elements: str) -> str:
    format_name = f" of {track.spec('format')}" if track.spec("format") else ""
    margin = track.spec("margin")
    scale = f"its scale with a margin of {margin:g} powers of two" if margin else "its scale"
    return f"amax is {_format_ratio(peak)} the rms, and under {scale} {elements} lie below the range{format_name}"


def _cause_by_floor(track: Track, sample: int) -> str:
    amax = f"amax is {track.of('amax')[sample]:.3g}"
    if track.of("amax")[sample] < track.amax_floor:
        return f"{amax}, which the recipe's amax_floor raises to {track.amax_floor:.3g}"
    return f"{amax}, too small for any FP32 scale to bring to the format's range"


def _format_ratio(peak: float) -> str:
    return f"{peak:.3g}x" if peak else "far beyond"  # the rms may underflow to 0


def _are_healthy(gemms: Sequence[Floats], limits: Thresholds) -> bool:
    return bool(gemms) and all(np.median(ratios) >= limits.healthy_product_db for ratios in gemms)


def zero_tensor(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find tensors of zeros and weights that are largely zero, in consecutive samples.

    Three samples in a row up to the last one; of a weight, ``zero_weight_fraction`` of zeros is enough.
    """
    for track in tracks(series):
        zeros = np.where(track.of("amax") == 0, 1.0, track.of("zero_fraction"))
        min_share = limits.zero_weight_fraction if track.key.role == "weight" else 1.0
        where = longest((zeros >= min_share) & (np.nan_to_num(track.of("nonfinite")) == 0))
        if length(where) < limits.persistent_looks or zeros[where][-1] < min_share:
            continue
        share = float(zeros[where].min())
        yield track.finding(
            where,
            "zero-tensor",
            Severity.WARN,
            cause=f"{'every element' if share == 1 else f'{share:.0%} of the elements'} of this {track.key.role} "
            f"{'is' if share == 1 else 'are'} exactly zero in {length(where)} consecutive samples",
            weight=share,
            zero_fraction=share,
            samples=length(where),
        )

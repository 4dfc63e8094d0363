"""Values that the format does not reach: too large for the scale, too small for it, or all zero."""

from collections.abc import Iterator, Sequence

import numpy as np

from octavo.doctor.findings import Finding, Severity
from octavo.doctor.rules.tracks import Track, longest, tracks
from octavo.doctor.series import Series
from octavo.doctor.tables import Floats
from octavo.doctor.thresholds import Thresholds

__all__ = ["bulk_underflow", "gradient_underflow", "saturation", "zero_tensor"]

READERS = {"input": ("output", "grad_weight"), "weight": ("output", "grad_input")}  # GEMMs of a role


def saturation(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Elements beyond what the scale provides for, look after look.

    Delayed scales clip a few elements whenever their tensor grows; of them, :func:`stale_scale` judges how much.
    """
    for track in tracks(series):
        fraction = track.of("saturation_fraction")
        where = longest(fraction > limits.saturation_fraction)
        if track.spec("scaling") == "delayed" or where.stop - where.start < limits.persistent_looks:
            continue
        worst, g = fraction[where].max(), track.growth[where].max()
        yield track.finding(
            where,
            "saturation",
            Severity.FAIL if g >= limits.stale_ratio_fail else Severity.WARN,
            cause=f"{worst:.2%} of the elements lie beyond the largest value that the scale provides for, "
            f"by up to {g:.2g}x",
            weight=worst,
            saturation_fraction=worst,
            stale_ratio=g,
        )


def gradient_underflow(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Gradients of which many nonzero elements become zero: what that costs shows in no SQNR."""
    for track in tracks(series):
        if track.key.role == "grad_output":
            yield from _underflow(track, limits, "gradient-underflow", "small gradients")


def bulk_underflow(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Inputs and weights whose largest elements set a scale under which many others become zero.

    One degree less severe where the elements that are lost have no energy to speak of and no GEMM misses them, as the
    smallest outputs of a softmax. No note where most of them are lost: a few rows that outweigh all others make every
    sum of squares healthy.
    """
    for track in tracks(series):
        if track.key.role != "grad_output":
            yield from _underflow(track, limits, "bulk-underflow", "the bulk", series)


def _gemms(track: Track, where: slice, series: Series) -> list[Floats]:
    """The SQNR, in dB, of each GEMM that reads what is cast, at those of the looks that know it."""
    table = series.products
    chosen = np.isin(table.steps, track.steps[where])
    ratios = [
        table.of("sqnr_db")[chosen, column]
        for column, key in enumerate(table.keys)
        if key.path == track.key.path and key.gemm in READERS[track.key.role]
    ]
    return [known for values in ratios if (known := values[np.isfinite(values)]).size]


def _underflow(
    track: Track, limits: Thresholds, code: str, what: str, series: Series | None = None
) -> Iterator[Finding]:
    lost = track.of("underflow_fraction")
    where = longest(lost >= limits.underflow_fraction)
    if where.stop - where.start < limits.persistent_looks:
        return
    worst, energy = lost[where].max(), track.of("flushed_energy")[where].max()
    peaks = (track.of("amax") / track.of("rms"))[where]
    peak = peaks[np.isfinite(peaks)].max(initial=0.0)
    sqnr = track.of("sqnr_db")[where].min()
    most = worst >= limits.underflow_fraction_fail
    severity, spared = Severity.FAIL if most else Severity.WARN, ""
    gemms = [] if series is None else _gemms(track, where, series)
    if energy <= limits.harmless_flush and sqnr >= limits.healthy_cast_db and _are_healthy(gemms, limits):
        severity, spared = Severity.WARN if most else Severity.NOTE, f"; they carried {energy:.2g} of the energy"
    look = where.start + int(lost[where].argmax())
    is_floored = bool(track.is_floored[look])
    why = _by_the_floor(track, look) if is_floored else _by_the_range(track, peak, what)
    yield track.finding(
        where,
        code,
        severity,
        cause=f"{worst:.0%} of the nonzero elements become zero: {why}{spared}",
        weight=worst,
        underflow_fraction=worst,
        flushed_energy=energy,
        sqnr_db=sqnr,
        peak=peak,
        amax_floor=track.amax_floor if is_floored else np.nan,
    )


def _by_the_range(track: Track, peak: float, what: str) -> str:
    reach = f" of {track.spec('format')}" if track.spec("format") else ""
    return f"amax is {_times(peak)} the rms, and {what} lie below the range{reach} under the scale that it sets"


def _by_the_floor(track: Track, look: int) -> str:
    amax = f"amax is {track.of('amax')[look]:.3g}"
    if track.of("amax")[look] < track.amax_floor:
        return f"{amax}, which the recipe's amax_floor takes for {track.amax_floor:.3g}"
    return f"{amax}, too small for any FP32 scale to bring to the format's range"


def _times(peak: float) -> str:
    return f"{peak:.3g}x" if peak else "far beyond"  # an rms that underflows is no number to divide by


def _are_healthy(gemms: Sequence[Floats], limits: Thresholds) -> bool:
    return bool(gemms) and all(np.median(ratios) >= limits.healthy_product_db for ratios in gemms)


def zero_tensor(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Tensors without a nonzero element, look after look, and weights of which a good part is exactly zero."""
    for track in tracks(series):
        zeros = np.where(track.of("amax") == 0, 1.0, track.of("zero_fraction"))
        most = limits.zero_weight_fraction if track.key.role == "weight" else 1.0
        where = longest((zeros >= most) & (np.nan_to_num(track.of("nonfinite")) == 0))
        if where.stop - where.start < limits.persistent_looks or zeros[where][-1] < most:
            continue
        share = float(zeros[where].min())
        yield track.finding(
            where,
            "zero-tensor",
            Severity.WARN,
            cause=f"{'every element' if share == 1 else f'{share:.0%} of the elements'} of this {track.key.role} "
            f"{'is' if share == 1 else 'are'} exactly zero at {where.stop - where.start} looks in a row",
            weight=share,
            zero_fraction=share,
            looks=where.stop - where.start,
        )

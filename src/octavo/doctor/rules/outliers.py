"""Rule for outliers that grow during training. Constant outliers are not reported."""

from collections.abc import Iterator

import numpy as np

from octavo.doctor.findings import Finding, Severity
from octavo.doctor.rules.tracks import Track, length, longest, module_tracks, tracks
from octavo.doctor.series import Series
from octavo.doctor.thresholds import Thresholds

__all__ = ["outlier_growth"]

EDGE = 3  # samples whose median stands for the beginning or the end


def outlier_growth(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find gated MLPs whose gate and up rows align while their product grows, and inputs whose peak keeps growing.

    Of a gated MLP: a cosine of ``alignment`` with a peak that grew ``outlier_growth`` times or reached
    ``aligned_peak``, or a cosine of ``aligned_exactly``. Of an input: a peak (amax over rms) that grew
    ``climbing_growth`` times and exceeds ``climbing_peak``.
    """
    inputs = [track for track in tracks(series) if track.key.role == "input" and len(track.steps) >= EDGE]
    aligned = list(_find_aligned(series, limits, inputs))
    yield from aligned
    for track in inputs:
        if not any(_is_inside(track.key.path, finding.path) for finding in aligned):
            yield from _find_climbing(track, limits)


def _find_aligned(series: Series, limits: Thresholds, inputs: list[Track]) -> Iterator[Finding]:
    for path, steps, cosines in module_tracks(series, "alignment"):
        where = longest(cosines >= limits.alignment)
        inside = [track for track in inputs if _is_inside(track.key.path, path)]
        if length(where) < limits.persistent_looks or not inside:
            continue
        worst = max(inside, key=lambda track: _peaks(track)[1])
        first, peak = _peaks(worst)
        growth, cosine = peak / first, float(cosines[where].max())
        if growth >= limits.outlier_growth or peak >= limits.aligned_peak or cosine >= limits.aligned_exactly:
            yield Finding(
                code="outlier-growth",
                severity=Severity.WARN,
                path=path,
                role="input",
                first_step=int(steps[where][0]),
                last_step=int(steps[where][-1]),
                evidence={"alignment": cosine, "peak_growth": growth, "peak": peak},
                cause=f"rows of gate and up projection point the same way (cosine {cosine:.3f}), so that their product "
                f"grows with the square: amax of the input of {worst.key.path} is {peak:.3g}x its rms, "
                f"{growth:.2g}x the ratio at the beginning",
                weight=peak,
            )


def _find_climbing(track: Track, limits: Thresholds) -> Iterator[Finding]:
    first, last = _peaks(track)
    growth = last / first
    if last < limits.climbing_peak or growth < limits.climbing_growth:
        return
    kurtosis = _edges(track.of("kurtosis"))
    yield track.finding(
        slice(0, len(track.steps)),
        "outlier-growth",
        Severity.NOTE if last < limits.harmful_peak else Severity.WARN,
        cause=f"amax over rms grew {growth:.2g}x to {last:.3g}, kurtosis from {kurtosis[0]:.3g} to {kurtosis[1]:.3g}; "
        "where it passes 8192, small elements are lost",
        weight=last,
        peak=last,
        peak_growth=growth,
        kurtosis=kurtosis[1],
    )


def _peaks(track: Track) -> tuple[float, float]:
    """Largest magnitude over rms at the beginning and at the end; 1 for a tensor of zeros."""
    rms = track.of("rms")
    return _edges(np.where(rms > 0, track.of("amax") / np.where(rms > 0, rms, 1), 1.0))


def _edges(values: np.typing.NDArray[np.float64]) -> tuple[float, float]:
    tiny = np.finfo(np.float64).tiny
    return max(float(np.median(values[:EDGE])), tiny), float(np.median(values[-EDGE:]))


def _is_inside(path: str, module: str) -> bool:
    return not module or path == module or path.startswith(f"{module}.")

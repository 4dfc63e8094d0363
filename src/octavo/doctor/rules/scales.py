"""Rules for scales that do not fit their tensors: frozen, oscillating, stale, inexact, or different between ranks.

g is a tensor's current amax over the amax that its scale was computed for. A dynamic scale has g = 1 exactly, one
rounded to a power of two 0.5 < g <= 1. A delayed scale relies on g staying near 1; elements above it saturate.
"""

from collections.abc import Iterator

import numpy as np

from octavo.doctor.findings import Finding, Severity
from octavo.doctor.rules.tracks import Mask, Track, length, longest, module_tracks, tracks
from octavo.doctor.series import Series
from octavo.doctor.tables import Floats
from octavo.doctor.thresholds import Thresholds

__all__ = ["frozen_scale", "inexact_amax", "rank_mismatch", "scale_oscillation", "stale_scale"]

ROUNDING = 1e-6  # tolerance of a logarithm


def frozen_scale(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find scales that stay identical in consecutive samples while their tensor's amax changes.

    Three samples of one scale whose amax changed by ``frozen_motion``, where a larger amax did not raise the scale or
    the scale outlived ``frozen_memories`` histories.
    """
    for track in tracks(series):
        where = longest(np.diff(track.of("scale"), prepend=np.nan) == 0)
        if where.stop > where.start:
            where = slice(where.start - 1, where.stop)
        amax = track.of("amax")[where]
        if len(amax) < limits.persistent_looks or amax.min() <= 0:
            continue
        moved = amax.max() / amax.min()
        if moved >= limits.frozen_motion and _should_have_moved(track, where, limits):
            yield _frozen_finding(track, where, limits, moved)


def _should_have_moved(track: Track, where: slice, limits: Thresholds) -> bool:
    if track.spec("scaling") == "dynamic":
        low, high = _exact_range(track, limits)
        g, is_above_floor = track.growth[where], track.is_above_floor[where]
        return bool((((g > high) | (g < low)) & is_above_floor).any())
    if track.spec("scaling") != "delayed":
        return False
    steps, g = track.steps[where], track.growth[where]
    if track.facts.get("statistic") == "max":
        outgrown = g > limits.frozen_excess  # a maximum follows by the next update
        if (outgrown & (steps < steps[-1] - track.facts.get("update_interval", 1) + 0.5)).any():
            return True
    return (
        _longest_below(steps, np.where(track.is_above_floor[where], g, 1.0), limits)
        > limits.frozen_memories * track.memory
    )


def _longest_below(steps: Floats, g: Floats, limits: Thresholds) -> float:
    """Largest number of steps during which no amax reached the one that the scale was computed for.

    An amax that reaches it explains an unchanged maximum, as does the floor while amaxes are near it.
    """
    reached = np.flatnonzero(g >= 1 - limits.exact_ratio)
    edges = np.concatenate([[steps[0]], steps[reached], [steps[-1]]])
    return float(np.diff(edges).max())


def _frozen_finding(track: Track, where: slice, limits: Thresholds, moved: float) -> Finding:
    g = track.growth[where]
    off = max(g.max(), 1 / g.min())
    saturated = track.of("saturation_fraction")[where].max()
    broken = g.max() >= limits.stale_ratio_fail or 1 / g.min() >= limits.loose_ratio_fail
    return track.finding(
        where,
        "frozen-scale",
        Severity.FAIL if broken else Severity.WARN,
        cause=f"the scale stayed {track.of('scale')[where][0]:.3g} in {len(g)} samples while amax changed {moved:.2g}x "
        f"and is up to {g.max():.2g}x the amax of the scale, {saturated:.2%} of the elements saturate",
        weight=np.log2(off),
        amax_motion=moved,
        stale_ratio=g.max(),
        least_stale_ratio=g.min(),
        saturation_fraction=saturated,
        samples=len(g),
    )


def scale_oscillation(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find scales that alternate by binades in consecutive samples, independently of their tensor.

    Judged are turns in a row (``oscillation_turns``), each of ``oscillation_binades`` or more, of the scale and of g
    alike. Severity fail from ``oscillation_binades_fail``, which saturates a fifth of a Gaussian at every other step.
    """
    for track in tracks(series):
        jumps = _log2_steps(track.of("scale"))
        growth_jumps = _log2_steps(track.growth)
        least = limits.oscillation_binades - ROUNDING
        large = (np.abs(jumps) >= least) & (np.abs(growth_jumps) >= least)
        turns = np.concatenate([[False], np.sign(jumps[1:]) * np.sign(jumps[:-1]) < 0]) & large
        where = longest(turns)
        count = length(where)
        if count >= limits.oscillation_turns:
            swing = float(np.abs(jumps[where]).max())
            yield track.finding(
                slice(where.start, where.stop + 1),
                "scale-oscillation",
                Severity.FAIL if swing >= limits.oscillation_binades_fail - ROUNDING else Severity.WARN,
                cause=f"the scale changed direction {count} times in a row by up to {2**swing:.2g}x, independently of "
                f"its tensor: amax was {track.growth.min():.2g}x to {track.growth.max():.2g}x the amax of the scale",
                weight=swing,
                swing_binades=swing,
                turns=count,
            )


def _log2_steps(values: Floats) -> Floats:
    """log2 of each value over the one before: [T - 1]; 0 where it is undefined."""
    with np.errstate(all="ignore"):
        return np.nan_to_num(np.diff(np.log2(values)), posinf=0.0, neginf=0.0)


def stale_scale(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find delayed scales that their tensor has outgrown or that a past outlier keeps too large.

    A g of ``stale_ratio`` in three samples is a warning, of ``stale_ratio_fail`` in two a failure. A g below
    1 / ``loose_ratio`` counts where ``underflow_fraction`` of the nonzeros are lost too.
    """
    for track in tracks(series):
        if track.spec("scaling") != "delayed":
            continue
        g = track.growth
        severe = longest(g >= limits.stale_ratio_fail)
        behind = longest(g >= limits.stale_ratio)
        if length(behind) >= limits.persistent_looks or length(severe) >= limits.persistent_looks_fail:
            is_broken = length(severe) >= limits.persistent_looks_fail
            yield _outgrown_finding(track, behind, Severity.FAIL if is_broken else Severity.WARN)
            continue
        loose = longest((g <= 1 / limits.loose_ratio) & track.is_above_floor & _has_underflow(track, limits))
        if length(loose) >= limits.persistent_looks:
            yield _too_large_finding(track, loose, limits)


def _has_underflow(track: Track, limits: Thresholds) -> Mask:
    return track.of("underflow_fraction") >= limits.underflow_fraction


def _outgrown_finding(track: Track, where: slice, severity: Severity) -> Finding:
    g = track.growth[where].max()
    saturated = track.of("saturation_fraction")[where].max()
    return track.finding(
        where,
        "stale-scale",
        severity,
        cause=f"{_describe_history(track)} lags: amax grew {g:.2g}x since the scale was computed, "
        f"{saturated:.2%} of the elements saturate",
        weight=np.log2(g),
        stale_ratio=g,
        saturation_fraction=saturated,
        sqnr_db=np.nanmin(np.append(track.of("sqnr_db")[where], np.inf)),
        samples=length(where),
    )


def _too_large_finding(track: Track, where: slice, limits: Thresholds) -> Finding:
    g, lost = track.growth[where].min(), track.of("underflow_fraction")[where].max()
    return track.finding(
        where,
        "stale-scale",
        Severity.FAIL if lost >= limits.underflow_fraction_fail else Severity.WARN,
        cause=f"{_describe_history(track)} keeps a past amax {1 / g:.2g}x the current one: "
        f"{lost:.0%} of the nonzero elements become zero",
        weight=-np.log2(g),
        stale_ratio=g,
        underflow_fraction=lost,
        samples=length(where),
    )


def _describe_history(track: Track) -> str:
    length = track.facts.get("history_length", 0)
    statistic = {"mean": "the mean of the scales of", "latest": "the latest of"}.get(
        track.facts.get("statistic", ""), ""
    )
    return f"{statistic} the history of {length} steps".strip()


def inexact_amax(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find dynamic scales whose g does not match their rounding: computed from a rounded amax or another tensor's.

    One sample is enough, of any scaling group.
    """
    for track in tracks(series):
        if track.spec("scaling") != "dynamic":
            continue
        low, high = _exact_range(track, limits)
        g, least = track.growth, track.least_growth
        is_judged = track.is_above_floor & (g > 0)
        wrong = np.flatnonzero(is_judged & ((g < low) | (g > high) | ((least > 0) & (least < low))))
        if wrong.size:
            yield _inexact_finding(track, wrong, (low, high), limits)


def _exact_range(track: Track, limits: Thresholds) -> tuple[float, float]:
    """Range of g for exact amaxes."""
    slack = limits.exact_ratio
    match track.spec("scale_rounding"):
        case "fp32":
            return 1 - slack, 1 + slack
        case "rceil":
            return 0.5 * (1 - slack), 1 + slack
    return 0.5 * (1 - slack), 2 * (1 + slack)


def _inexact_finding(
    track: Track, wrong: np.typing.NDArray[np.intp], exact: tuple[float, float], limits: Thresholds
) -> Finding:
    ratios = np.concatenate([track.growth[wrong], track.least_growth[wrong]])
    g = ratios[(ratios > 0) & ((ratios < exact[0]) | (ratios > exact[1]))]
    worst = float(g[np.argmax(np.abs(np.log2(g)))])
    off = max(worst, 1 / worst)
    rounded = off <= limits.rounded_amax
    source = (
        f"an amax that differs by {abs(worst - 1):.2%} from its tensor's, as after rounding to fewer bits"
        if rounded
        else (f"an amax of another tensor: its own tensor's is {worst:.3g}x as large")
    )
    return track.finding(
        slice(int(wrong[0]), int(wrong[-1]) + 1),
        "inexact-amax",
        Severity.FAIL if off >= limits.stale_ratio_fail else Severity.WARN,
        cause=f"the scale was computed from {source} ({wrong.size} of {len(track.steps)} samples)",
        weight=np.log2(off),
        stale_ratio=worst,
        samples=wrong.size,
        saturation_fraction=track.of("saturation_fraction")[wrong].max(),
    )


def rank_mismatch(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find ranks with different scales: any difference for identical weights, large lasting ones for data.

    Of a weight that is identical on all ranks, one sample with any difference is enough. Data need delayed scales,
    which come from all ranks' amaxes, and three samples with a ratio above ``rank_ratio_input`` for inputs,
    ``rank_ratio`` for gradients. A dynamic scale is that of the rank's own data: gradients of two micro-batches differ
    by 100x at times.
    """
    for name, steps, ratios in module_tracks(series, "rank_scale_ratio"):
        path, role, gemm = name.rsplit(" ", 2)
        facts = series.layers.get(path, {}).get("casts", {}).get(f"{role} {gemm}", {})
        if role != "weight" and facts.get("scaling") != "delayed":
            continue
        allowed = {"weight": 1 + limits.exact_ratio, "input": limits.rank_ratio_input}.get(role, limits.rank_ratio)
        where = longest(ratios > allowed)
        if length(where) >= (1 if role == "weight" else limits.persistent_looks):
            worst = float(ratios[where].max())
            largest, smallest = (
                _rank_at(series, f"rank_of_{extreme}_scale", name, steps[where][ratios[where].argmax()])
                for extreme in ("largest", "smallest")
            )
            yield Finding(
                code="rank-mismatch",
                severity=Severity.FAIL,
                path=path,
                role=role,
                first_step=int(steps[where][0]),
                last_step=int(steps[where][-1]),
                evidence={"rank_scale_ratio": worst, "samples": float(length(where))},
                cause=f"{largest or 'one rank'} casts this {role} with a scale {worst:.3g}x "
                f"{smallest or 'another'}'s: their amaxes were reduced over the wrong ranks, or not at all",
                weight=float(np.log2(worst)),
            )


def _rank_at(series: Series, table: str, name: str, step: float) -> str:
    """The rank that a table has for a cast at a step, as "rank 3"; nothing in a run that recorded none."""
    for key, steps, ranks in module_tracks(series, table):
        if key == name and step in steps:
            return f"rank {ranks[np.flatnonzero(steps == step)[0]]:.0f}"
    return ""

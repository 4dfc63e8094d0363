"""Bars of a part, and their verdicts.

A part declares its bars beforehand, so that none is lost with a variant: a bar whose variants failed or had no time is
reported as not judged, with the reason, and counts among all bars.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.hopper.session import Timings
from benchmarks.hopper.tables import faster, times_as_fast
from octavo.bench.results import Failure, Verdict

__all__ = ["judged_by_memory", "judged_by_speed", "not_judged", "still_owed", "why_absent"]

NOT_TIMED = "it was not timed"
NO_MEMORY = "memory is not measured here"


def judged_by_speed(bar: Verdict, found: Timings, ours: Sequence[str], bases: Sequence[str]) -> Verdict:
    """Judge the speed of the fastest of ``ours`` over the fastest of ``bases``, among variants that ran."""
    for names in (bases, ours):
        if found.seconds.keys().isdisjoint(names):
            return not_judged(bar, why_absent(names, found.failures))
    base = faster(found, *bases)
    speeds = {name: float(times_as_fast(found, name, base).median) for name in ours if name in found.seconds}
    best = max(speeds, key=lambda name: speeds[name])
    return replace(bar, found=speeds[best], by=f"{best} over {base}")


def judged_by_memory(
    bar: Verdict, peaks: Mapping[str, int], ours: Sequence[str], base: str, failures: Sequence[Failure]
) -> Verdict:
    """Judge the smallest peak of ``ours`` over that of ``base``; 0 is not measured."""
    for names in ((base,), ours):
        if peaks.keys().isdisjoint(names):
            return not_judged(bar, why_absent(names, failures))
    if not peaks[base]:
        return not_judged(bar, NO_MEMORY)
    least = min((name for name in ours if name in peaks), key=lambda name: peaks[name])
    return replace(bar, found=peaks[least] / peaks[base], by=f"{least} over {base}")


def not_judged(bar: Verdict, reason: str) -> Verdict:
    """Bar without a figure, with the reason."""
    return replace(bar, found=None, by="", reason=reason)


def still_owed(bars: Sequence[Verdict], given: Sequence[Verdict], reason: str) -> tuple[Verdict, ...]:
    """Bars of a part that none of its sections judged, with the reason."""
    known = {verdict.claim for verdict in given}
    return tuple(not_judged(bar, reason) for bar in bars if bar.claim not in known)


def why_absent(names: Sequence[str], failures: Sequence[Failure]) -> str:
    """Line with the reasons why none of these variants has a figure.

    Example:
        >>> why_absent(["a", "b"], [Failure(name="a", reason="no memory"), Failure(name="b", reason="no time")])
        'a: no memory; b: no time'
        >>> why_absent(["a", "b"], [Failure(name="b", reason="no time"), Failure(name="a", reason="no time")])
        'a, b: no time'
    """
    reasons = {failure.name: failure.reason for failure in failures}
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(reasons.get(name, NOT_TIMED), []).append(name)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in alike.items())

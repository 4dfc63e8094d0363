"""Diagnosis of a run: apply every rule to its series, then drop findings that another finding explains.

Rules are independent: each reads only its own numbers. Consequences, such as the saturation that a frozen scale causes
or the infinite gradients of a loss scale that is too large, are listed once, in EXPLAINS, for each cause. A resolved
finding becomes a note and explains only what ended with it. Remaining findings that are the same in most layers are
merged into one (:mod:`octavo.doctor.run_wide`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from octavo.doctor.findings import (
    LARGE_UPDATE,
    REPLACED_WEIGHTS,
    STALLED_LOSS,
    Finding,
    Findings,
    Severity,
    worst_first,
)
from octavo.doctor.losses import SEEN_AT, level_near_unigram, plateau
from octavo.doctor.remedies import remedies_for
from octavo.doctor.resolved import RESOLVED_AT, as_note_if_resolved
from octavo.doctor.rules import LOSS_RULES, RULES, loss_gap
from octavo.doctor.rules.tracks import nonfinite_casts
from octavo.doctor.run_wide import run_wide
from octavo.doctor.series import Series
from octavo.doctor.thresholds import Thresholds

__all__ = ["diagnose"]

_BY_SCALE = frozenset({"saturation", "gradient-underflow", "bulk-underflow"})
_SCALES = frozenset({"stale-scale", "frozen-scale", "inexact-amax", "scale-oscillation"})
ABOUT_LOSS = ("divergence", "loss-spike", "learning-rate", "stalled-loss")
_LATER = _SCALES | _BY_SCALE
_LATER |= {"nonfinite", "outlier-growth", "gradient-below-noise", "divergence", "loss-spike", "stalled-loss"}
_LATER |= {"loss-gap", "batch-norm"}
_LOSS = frozenset({"divergence", "loss-spike", "stalled-loss", "loss-gap"})
_SYMPTOMS = _BY_SCALE | {"stale-scale", "scale-oscillation", "gradient-below-noise", "loss-gap"}  # of a diverged loss


@dataclass(frozen=True, slots=True)
class _Consequences:
    """Codes of the findings that a cause explains.

    Attributes:
        here: at the same tensor or within the same module.
        later: anywhere, if the cause breaks training (severity fail, a diverging or spiking loss, or a learning rate
            under which the loss rose) and came first.
        anyhow: anywhere, regardless of severity and time.
    """

    here: frozenset[str] = frozenset()
    later: frozenset[str] = frozenset()
    anyhow: frozenset[str] = frozenset()


_NOISE = frozenset({"gradient-below-noise"})
EXPLAINS = {
    "loss-scale": _Consequences(later=_LATER, anyhow=frozenset({"nonfinite", "zero-tensor", "gradient-underflow"})),
    "learning-rate": _Consequences(later=_LATER | {"zero-tensor"}, anyhow=_LOSS | {"outlier-growth"}),
    "weight-jump": _Consequences(
        here=_SCALES | _BY_SCALE, later=_LATER | {"zero-tensor"}, anyhow=_NOISE | {"outlier-growth"}
    ),
    "stale-weight": _Consequences(here=_SCALES | _BY_SCALE, later=_LATER, anyhow=_NOISE),
    "rank-mismatch": _Consequences(here=_SCALES | _BY_SCALE, later=_LATER, anyhow=_NOISE),
    "scale-oscillation": _Consequences(here=_SCALES | _BY_SCALE, later=_LATER, anyhow=_NOISE),
    "frozen-scale": _Consequences(here=_SCALES | _BY_SCALE, later=_LATER - {"frozen-scale"}, anyhow=_NOISE),
    "inexact-amax": _Consequences(here=_BY_SCALE, later=_LATER - {"inexact-amax"}, anyhow=_NOISE),
    "stale-scale": _Consequences(here=_BY_SCALE, later=_BY_SCALE | _LOSS | {"nonfinite"}, anyhow=_NOISE),
    "nonfinite": _Consequences(later=_LATER | {"zero-tensor", "learning-rate", "starved-experts"}),
    "sensitive-module": _Consequences(here=_BY_SCALE, later=frozenset({"loss-gap"}), anyhow=_NOISE),
    "outlier-growth": _Consequences(here=_SCALES - {"inexact-amax"} | _BY_SCALE, anyhow=_NOISE),
    "zero-tensor": _Consequences(here=_BY_SCALE, anyhow=frozenset({"zero-tensor"})),
    "saturation": _Consequences(later=_LOSS | {"nonfinite"}, anyhow=_NOISE),
    "bulk-underflow": _Consequences(later=_LOSS, anyhow=_NOISE),
    "gradient-underflow": _Consequences(later=frozenset({"loss-gap"}), anyhow=_NOISE),
    "biased-accumulation": _Consequences(later=_LOSS),
    "divergence": _Consequences(later=_SYMPTOMS, anyhow=frozenset({"loss-spike", "stalled-loss"})),
    "loss-spike": _Consequences(later=_SYMPTOMS),
    "stalled-loss": _Consequences(),
}


def diagnose(series: Series, thresholds: Thresholds | None = None, *, reference: Series | None = None) -> Findings:
    """Diagnose a run: findings with their rule-based remedies, worst first; empty for a healthy run.

    Args:
        series: the series of a run or of a watcher's samples.
        thresholds: limits of the rules; None for the defaults.
        reference: the series of the same run in high precision, for a comparison of losses.

    Example:
        >>> from octavo.doctor.series import series_of
        >>> diagnose(series_of([]))
        []
    """
    limits = thresholds or Thresholds()
    with np.errstate(all="ignore"):  # undefined numbers such as 0 / 0 are NaN, which no rule reports
        findings = [as_note_if_resolved(finding, series) for rule in RULES for finding in rule(series, limits)]
        if reference is not None:
            findings += loss_gap(series, reference, limits)
        unexplained = _without_consequences(_worst_per_tensor(findings), series)
        causes = _loss_first(run_wide(unexplained, {key.path for key in series.casts.keys}))
        if reference is not None:
            causes = list(_compared(causes, reference, limits))
    return Findings(
        replace(one, remedies=remedies_for(one, series), may_be_older=one.first_step == series.kept_from)
        for one in causes
    )


def _compared(findings: Iterable[Finding], reference: Series, limits: Thresholds) -> Iterator[Finding]:
    """The findings; those about the loss say whether the reference has them too."""
    codes = {finding.code for rule in LOSS_RULES for finding in rule(reference, limits)}
    if plateau(reference, limits) is not None or level_near_unigram(reference, limits) is not None:
        codes.add(STALLED_LOSS)
    for one in findings:
        if one.code in ABOUT_LOSS:
            has_it = one.code in codes or (STALLED_LOSS in one.evidence and STALLED_LOSS in codes)
            said = "the reference does the same, so FP8 is not the cause" if has_it else "the reference does not"
            yield replace(one, cause=f"{one.cause}; {said}")
        else:
            yield one


def _loss_first(findings: list[Finding]) -> list[Finding]:
    """Findings with a learning rate or a divergence before what began with it or later and may follow from it.

    A sample does not show which of two that it shows first came first in the steps before it.
    """
    result = list(findings)
    for one in findings:
        if one.code in ABOUT_LOSS and one.severity is not Severity.NOTE:
            later, index = EXPLAINS[one.code].later, result.index(one)
            follows = [other.code in later and other.first_step >= one.first_step for other in result[:index]]
            place = follows.index(True) if any(follows) else index
            result.insert(place, result.pop(index))
    return result


def _worst_per_tensor(findings: Iterable[Finding]) -> list[Finding]:
    """The worst finding of each code and tensor: casts for two GEMMs may both have one."""
    worst: dict[tuple[str, str, str], Finding] = {}
    for finding in worst_first(list(findings)):
        worst.setdefault((finding.code, finding.path, finding.role), finding)
    return list(worst.values())


def _without_consequences(findings: list[Finding], series: Series) -> list[Finding]:
    """Findings that no other explains; if two explain each other, the one whose code comes first in EXPLAINS."""
    order = {(key.path, key.role): index for index, key in reversed(list(enumerate(nonfinite_casts(series)[0])))}
    ranks = {code: rank for rank, code in enumerate(EXPLAINS)}

    def is_explained(one: Finding, by: Finding) -> bool:
        if not _explains(by, one, order):
            return False
        return not _explains(one, by, order) or ranks[by.code] < ranks[one.code]

    causes = {id(one): [by for by in findings if by is not one and is_explained(one, by)] for one in findings}
    followers: dict[int, list[Finding]] = {}
    for one in findings:
        for root in _roots(one, causes)[:1] if causes[id(one)] else ():
            followers.setdefault(id(root), []).append(one)
    return [_with_consequences(one, followers.get(id(one), [])) for one in findings if not causes[id(one)]]


def _with_consequences(cause: Finding, followers: Sequence[Finding]) -> Finding:
    """The cause with their number by code; a learning rate is as severe as what follows from it."""
    severities = [one.severity for one in followers] if cause.code == "learning-rate" else []
    severity = Severity.FAIL if Severity.FAIL in severities else cause.severity
    return replace(cause, consequences=dict(Counter(one.code for one in followers)), severity=severity)


def _roots(finding: Finding, causes: Mapping[int, Sequence[Finding]]) -> list[Finding]:
    """Findings without a cause from which this one follows, the nearest first."""
    line, seen = [finding], {id(finding)}
    for one in line:
        new = [by for by in causes[id(one)] if id(by) not in seen]
        seen |= set(map(id, new))
        line += new
    return [one for one in line if not causes[id(one)]]


def _explains(cause: Finding, other: Finding, order: dict[tuple[str, str], int]) -> bool:
    reach = EXPLAINS.get(cause.code, _Consequences())
    if LARGE_UPDATE in cause.evidence:  # a possible cause, which is listed first but hides nothing
        return False
    if cause.severity is Severity.NOTE and other.last_step > cause.evidence.get(RESOLVED_AT, -1):
        return False
    if other.code in reach.here and other.code != cause.code and _is_same_place(other, cause):
        return True
    if other.code in reach.anyhow and (other.code != cause.code or _precedes(cause, other, order)):
        return True
    return _breaks_training(cause) and other.code in reach.later and _precedes(cause, other, order)


def _breaks_training(cause: Finding) -> bool:
    """True if later findings may follow from this one; a resolved cause explains what was resolved with it."""
    is_high_rate = cause.code == "learning-rate" and (
        cause.evidence.get("loss_rise", 0.0) > 0
        or not cause.evidence.keys().isdisjoint({REPLACED_WEIGHTS, STALLED_LOSS})
    )
    return cause.severity is not Severity.WARN or cause.code in ("divergence", "loss-spike") or is_high_rate


def _is_same_place(other: Finding, cause: Finding) -> bool:
    """True if both concern the same tensor, or ``other`` a tensor in the module of ``cause``."""
    if cause.role and other.path == cause.path:
        return other.role in (cause.role, "")
    return not cause.path or other.path == cause.path or other.path.startswith(f"{cause.path}.")


def _precedes(cause: Finding, other: Finding, order: dict[tuple[str, str], int]) -> bool:
    """True if the cause comes first: by step, then in cast order; run-wide findings come last in their step.

    A loss diverges between two sampled steps. A finding that first appears in the next sampled step may have started
    before or after the divergence, and is neither its cause nor its consequence.
    """
    if SEEN_AT in cause.evidence or SEEN_AT in other.evidence:
        return cause.evidence.get(SEEN_AT, cause.first_step) < other.first_step
    last = len(order)
    positions = [order.get((one.path, one.role), last) for one in (cause, other)]
    first, then = cause.first_step, other.first_step
    return (first, positions[0]) < (then, positions[1]) or (not cause.path and first <= then)

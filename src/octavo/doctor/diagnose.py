"""From a run's statistics to findings: every rule reads the same series, and causes swallow their consequences.

A rule looks at its own numbers and knows no other. That a frozen scale also saturates, or that a loss scale too large
leaves gradients that are not finite, is said here, once: EXPLAINS lists what each cause leads to, and where. A finding
that is mended is a note, and explains what was over with it. What is left, and is the same in most layers, is one
finding (:mod:`octavo.doctor.run_wide`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from octavo.doctor.findings import Finding, Severity, worst_first
from octavo.doctor.losses import SEEN_AT
from octavo.doctor.mended import MENDED_AT, after_mending
from octavo.doctor.remedies import remedies_for
from octavo.doctor.rules import RULES, loss_gap
from octavo.doctor.run_wide import run_wide
from octavo.doctor.series import Series
from octavo.doctor.thresholds import Thresholds

__all__ = ["diagnose"]

_BY_SCALE = frozenset({"saturation", "gradient-underflow", "bulk-underflow"})
_SCALES = frozenset({"stale-scale", "frozen-scale", "inexact-amax", "scale-oscillation"})
_LATER = _SCALES | _BY_SCALE
_LATER |= {"nonfinite", "outlier-growth", "gradient-below-noise", "divergence", "loss-gap", "batch-norm"}
_LOSS = frozenset({"divergence", "loss-gap"})


@dataclass(frozen=True, slots=True)
class _Reach:
    """What a cause explains.

    Attributes:
        here: at the same tensor, or within the same module.
        later: anywhere, if the cause breaks training (severity fail, or a loss that diverges) and came first.
        anyhow: anywhere, whatever its severity and whenever.
    """

    here: frozenset[str] = frozenset()
    later: frozenset[str] = frozenset()
    anyhow: frozenset[str] = frozenset()


_NOISE = frozenset({"gradient-below-noise"})
EXPLAINS = {
    "loss-scale": _Reach(later=_LATER, anyhow=frozenset({"nonfinite", "zero-tensor", "gradient-underflow"})),
    "learning-rate": _Reach(later=_LATER, anyhow=_LOSS | {"outlier-growth"}),
    "stale-weight": _Reach(here=_SCALES | _BY_SCALE, later=_LATER, anyhow=_NOISE),
    "rank-mismatch": _Reach(here=_SCALES | _BY_SCALE, later=_LATER, anyhow=_NOISE),
    "scale-oscillation": _Reach(here=_SCALES | _BY_SCALE, later=_LATER, anyhow=_NOISE),
    "frozen-scale": _Reach(here=_SCALES | _BY_SCALE, later=_LATER - {"frozen-scale"}, anyhow=_NOISE),
    "inexact-amax": _Reach(here=_BY_SCALE, later=_LATER - {"inexact-amax"}, anyhow=_NOISE),
    "stale-scale": _Reach(here=_BY_SCALE, later=_BY_SCALE | _LOSS | {"nonfinite"}, anyhow=_NOISE),
    "nonfinite": _Reach(later=_LATER | {"zero-tensor", "learning-rate"}),
    "sensitive-module": _Reach(here=_BY_SCALE, later=frozenset({"loss-gap"}), anyhow=_NOISE),
    "outlier-growth": _Reach(here=_SCALES - {"inexact-amax"} | _BY_SCALE, anyhow=_NOISE),
    "zero-tensor": _Reach(here=_BY_SCALE, anyhow=frozenset({"zero-tensor"})),
    "saturation": _Reach(later=_LOSS | {"nonfinite"}, anyhow=_NOISE),
    "bulk-underflow": _Reach(later=_LOSS, anyhow=_NOISE),
    "gradient-underflow": _Reach(later=frozenset({"loss-gap"}), anyhow=_NOISE),
    "biased-accumulation": _Reach(later=_LOSS),
    "divergence": _Reach(later=_BY_SCALE | {"stale-scale", "scale-oscillation", "gradient-below-noise", "loss-gap"}),
}


def diagnose(series: Series, thresholds: Thresholds | None = None, *, reference: Series | None = None) -> list[Finding]:
    """Findings, worst first, with the remedies that are known by rule; none for a healthy run.

    Args:
        series: of a run, or of a watcher's samples.
        thresholds: None for the defaults.
        reference: of the same run in high precision, whose loss is compared.

    Example:
        >>> from octavo.doctor.series import series_of
        >>> diagnose(series_of([]))
        []
    """
    limits = thresholds or Thresholds()
    with np.errstate(all="ignore"):  # what does not exist, such as 0 / 0, is NaN, which no rule finds
        found = [after_mending(finding, series) for rule in RULES for finding in rule(series, limits)]
        if reference is not None:
            found += loss_gap(series, reference, limits)
        causes = run_wide(_causes(_one_a_place(found), series), {key.path for key in series.casts.keys})
    return [replace(finding, remedies=remedies_for(finding, series)) for finding in causes]


def _one_a_place(findings: Iterable[Finding]) -> list[Finding]:
    """The worst of those that say the same of one tensor, such as of its casts for two GEMMs."""
    kept: dict[tuple[str, str, str], Finding] = {}
    for one in worst_first(list(findings)):
        kept.setdefault((one.code, one.path, one.role), one)
    return list(kept.values())


def _causes(findings: list[Finding], series: Series) -> list[Finding]:
    """Those that no other explains; of two that explain each other, the one whose code stands first in EXPLAINS."""
    order = {(key.path, key.role): index for index, key in reversed(list(enumerate(series.casts.keys)))}
    ranks = {code: rank for rank, code in enumerate(EXPLAINS)}

    def is_explained(one: Finding, by: Finding) -> bool:
        if not _explains(by, one, order):
            return False
        return not _explains(one, by, order) or ranks[by.code] < ranks[one.code]

    return [one for one in findings if not any(is_explained(one, by) for by in findings if by is not one)]


def _explains(cause: Finding, other: Finding, order: dict[tuple[str, str], int]) -> bool:
    reach = EXPLAINS.get(cause.code, _Reach())
    if cause.severity is Severity.NOTE and other.last_step > cause.evidence.get(MENDED_AT, -1):
        return False
    if other.code in reach.here and other.code != cause.code and _is_at(other, cause):
        return True
    if other.code in reach.anyhow and (other.code != cause.code or _is_before(cause, other, order)):
        return True
    breaks = cause.severity is not Severity.WARN or cause.code == "divergence"  # a note is mended here, as the other
    return breaks and other.code in reach.later and _is_before(cause, other, order)


def _is_at(other: Finding, cause: Finding) -> bool:
    """Whether both are about one tensor, or one about a tensor of the other's module."""
    if cause.role and other.path == cause.path:
        return other.role in (cause.role, "")
    return not cause.path or other.path == cause.path or other.path.startswith(f"{cause.path}.")


def _is_before(cause: Finding, other: Finding, order: dict[tuple[str, str], int]) -> bool:
    """In time, then in the order of a step's casts; what is about the whole run is after everything of its step.

    A loss leaves between two looks. What the look after that is the first to show may have come with it or before it:
    such a finding is neither the loss's cause nor its consequence.
    """
    if SEEN_AT in cause.evidence or SEEN_AT in other.evidence:
        return cause.evidence.get(SEEN_AT, cause.first_step) < other.first_step
    last = len(order)
    places = [order.get((one.path, one.role), last) for one in (cause, other)]
    first, then = cause.first_step, other.first_step
    return (first, places[0]) < (then, places[1]) or (not cause.path and first <= then)

"""Problems resolved during the run: failed steps that were repeated, and findings that the autopilot resolved.

Such a finding becomes a note, with the step in its evidence as "mended_at".
"""

from dataclasses import replace
from typing import Any

import numpy as np

from octavo.doctor.findings import Finding, Severity
from octavo.doctor.series import Series

__all__ = ["RESOLVED_AT", "as_note_if_resolved", "as_resolved_note", "recovered_steps"]

RESOLVED_AT = "mended_at"


def recovered_steps(series: Series) -> set[float]:
    """Failed steps that were repeated under other settings and finished."""
    failed = [event["step"] for event in series.events if event["kind"] == "failure"]
    return set(np.intersect1d(failed, series.curve("loss")[0]).tolist()) if failed else set()


def as_resolved_note(finding: Finding, step: float) -> Finding:
    """The finding as a note with the step at which it was resolved."""
    return replace(
        finding,
        severity=Severity.NOTE,
        evidence={**finding.evidence, RESOLVED_AT: float(step)},
        cause=f"{finding.cause}; resolved at step {step:.0f}",
    )


def as_note_if_resolved(finding: Finding, series: Series) -> Finding:
    """A note for a finding that no longer appears since the autopilot changed its layer; other findings unchanged."""
    recovered = recovered_steps(series)
    changes = [
        period.step
        for period in series.periods.get(finding.path, ())[1:]
        if period.step > finding.last_step or (period.step == finding.last_step and period.step in recovered)
    ]
    helpful_steps = [
        act["step"]
        for act in _helpful_acts(series)
        if act["path"] == finding.path and act["step"] >= finding.last_step and changes
        if act["finding"] == finding.code or act["step"] <= changes[0]
    ]
    return (
        as_resolved_note(finding, helpful_steps[0])
        if helpful_steps and finding.severity is not Severity.NOTE
        else finding
    )


def _helpful_acts(series: Series) -> list[dict[str, Any]]:
    """Lines of the autopilot's acts, without those that were reverted because they did not help."""
    lines = [event for event in series.events if event["kind"] == "autopilot" and event.get("changes")]
    reverted = {line["takes_back"] for line in lines if "takes_back" in line and not line["helped"]}
    return [line for line in lines if "takes_back" not in line and line["number"] not in reverted]

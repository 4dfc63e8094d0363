"""What the run itself got over: steps that broke and were made again, and findings that the autopilot mended.

A finding about such is a note, with the step in its evidence as "mended_at".
"""

from dataclasses import replace
from typing import Any

import numpy as np

from octavo.doctor.findings import Finding, Severity
from octavo.doctor.series import Series

__all__ = ["MENDED_AT", "after_mending", "mended", "survived_steps"]

MENDED_AT = "mended_at"


def survived_steps(series: Series) -> set[float]:
    """Steps that broke, and that were finished all the same: made again under other settings."""
    failed = [event["step"] for event in series.events if event["kind"] == "failure"]
    return set(np.intersect1d(failed, series.curve("loss")[0]).tolist()) if failed else set()


def mended(finding: Finding, step: float) -> Finding:
    """The finding as a note that says since when it is over."""
    return replace(
        finding,
        severity=Severity.NOTE,
        evidence={**finding.evidence, MENDED_AT: float(step)},
        cause=f"{finding.cause}; mended at step {step:.0f}",
    )


def after_mending(finding: Finding, series: Series) -> Finding:
    """A note of a layer's finding that no look has shown since the autopilot changed the layer; any other as it is."""
    over = survived_steps(series)
    changes = [
        period.step
        for period in series.periods.get(finding.path, ())[1:]
        if period.step > finding.last_step or (period.step == finding.last_step and period.step in over)
    ]
    since = [
        act["step"]
        for act in _acts_that_helped(series)
        if act["path"] == finding.path and act["step"] >= finding.last_step and changes
        if act["finding"] == finding.code or act["step"] <= changes[0]
    ]
    return mended(finding, since[0]) if since and finding.severity is not Severity.NOTE else finding


def _acts_that_helped(series: Series) -> list[dict[str, Any]]:
    """Lines of the autopilot's acts but for those that were taken back in vain."""
    lines = [event for event in series.events if event["kind"] == "autopilot" and event.get("changes")]
    vain = {line["takes_back"] for line in lines if "takes_back" in line and not line["helped"]}
    return [line for line in lines if "takes_back" not in line and line["number"] not in vain]

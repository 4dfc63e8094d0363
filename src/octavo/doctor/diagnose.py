"""From a run's statistics to findings: every rule reads the same series."""

from dataclasses import replace

from octavo.doctor.findings import Finding, worst_first
from octavo.doctor.remedies import remedies_for
from octavo.doctor.rules import RULES
from octavo.doctor.series import Series
from octavo.doctor.thresholds import Thresholds

__all__ = ["diagnose"]


def diagnose(series: Series, thresholds: Thresholds | None = None) -> list[Finding]:
    """Findings, worst first, with the remedies that are known by rule; none for a healthy run.

    Args:
        series: of a run, or of a watcher's samples.
        thresholds: None for the defaults.

    Example:
        >>> from octavo.doctor.series import series_of
        >>> diagnose(series_of([]))
        []
    """
    limits = thresholds or Thresholds()
    found = worst_first([finding for rule in RULES for finding in rule(series, limits)])
    return [replace(finding, remedies=remedies_for(finding, series)) for finding in found]

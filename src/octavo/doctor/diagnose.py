"""From a run's statistics to findings: every rule reads the same series."""

from octavo.doctor.findings import Finding, worst_first
from octavo.doctor.rules import RULES
from octavo.doctor.series import Series
from octavo.doctor.thresholds import Thresholds

__all__ = ["diagnose"]


def diagnose(series: Series, thresholds: Thresholds | None = None) -> list[Finding]:
    """Findings, worst first; none for a healthy run.

    Args:
        series: of a run, or of a watcher's samples.
        thresholds: None for the defaults.

    Example:
        >>> from octavo.doctor.series import series_of
        >>> diagnose(series_of([]))
        []
    """
    limits = thresholds or Thresholds()
    return worst_first([finding for rule in RULES for finding in rule(series, limits)])

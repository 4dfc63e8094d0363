"""The doctor: find what goes wrong in FP8 training, prove why, and say what mends it."""

from octavo.doctor.diagnose import diagnose
from octavo.doctor.findings import Finding, Severity
from octavo.doctor.series import Sample, Series, series_of
from octavo.doctor.thresholds import Thresholds
from octavo.doctor.watch import StepNotes, Watcher, watch

__all__ = [
    "Finding",
    "Sample",
    "Series",
    "Severity",
    "StepNotes",
    "Thresholds",
    "Watcher",
    "diagnose",
    "series_of",
    "watch",
]

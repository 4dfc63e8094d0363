"""Find what goes wrong in FP8 training, prove the cause by replay, and recommend remedies."""

from octavo.doctor.candidates import Candidate
from octavo.doctor.capture import Capture, Captures, load_capture
from octavo.doctor.diagnose import diagnose
from octavo.doctor.findings import Finding, Findings, Remedy, Severity
from octavo.doctor.replay import Trial, replay
from octavo.doctor.series import Sample, Series, series_of
from octavo.doctor.thresholds import Thresholds
from octavo.doctor.watch import StepNotes, Watcher, watch

__all__ = [
    "Candidate",
    "Capture",
    "Captures",
    "Finding",
    "Findings",
    "Remedy",
    "Sample",
    "Series",
    "Severity",
    "StepNotes",
    "Thresholds",
    "Trial",
    "Watcher",
    "diagnose",
    "load_capture",
    "replay",
    "series_of",
    "watch",
]

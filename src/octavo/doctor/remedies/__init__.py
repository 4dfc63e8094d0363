"""Remedies for findings: selected by rule, ranked by replay, written to a configuration or applied to a live model."""

from octavo.doctor.findings import Remedy
from octavo.doctor.remedies.live import Undo, apply_to_model, take_back
from octavo.doctor.remedies.merging import applied
from octavo.doctor.remedies.ranking import ranked
from octavo.doctor.remedies.selection import remedies_for

__all__ = ["Remedy", "Undo", "applied", "apply_to_model", "ranked", "remedies_for", "take_back"]

"""Checks before a long run, one file each."""

from octavo.experiments.preflight.all_checks import preflight
from octavo.experiments.preflight.check import Check

__all__ = ["Check", "preflight"]

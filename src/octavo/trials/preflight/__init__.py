"""What is tried before a long run, one file a check."""

from octavo.trials.preflight.all_checks import preflight
from octavo.trials.preflight.check import Check

__all__ = ["Check", "preflight"]

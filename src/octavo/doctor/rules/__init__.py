"""One rule a kind of finding: what the statistics look like when that goes wrong."""

from octavo.doctor.rules.registry import RULES

__all__ = ["RULES"]

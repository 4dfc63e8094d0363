"""Diagnostic rules, one for each kind of finding."""

from octavo.doctor.rules.divergence import divergence
from octavo.doctor.rules.gap import loss_gap
from octavo.doctor.rules.modules import slow_layers
from octavo.doctor.rules.registry import RULES

__all__ = ["RULES", "divergence", "loss_gap", "slow_layers"]

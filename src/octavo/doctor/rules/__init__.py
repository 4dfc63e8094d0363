"""Diagnostic rules, one for each kind of finding."""

from octavo.doctor.rules.divergence import divergence
from octavo.doctor.rules.gap import loss_gap
from octavo.doctor.rules.modules import slow_layers
from octavo.doctor.rules.registry import LOSS_RULES, RULES

__all__ = ["LOSS_RULES", "RULES", "divergence", "loss_gap", "slow_layers"]

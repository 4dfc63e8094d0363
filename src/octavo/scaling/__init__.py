"""Scaling state of a layer: amax histories, what a call records, and when the steps of delayed scaling end."""

from octavo.scaling.amax_history import EMPTY, AmaxHistory, ScaleUpdates, WeightSeen
from octavo.scaling.operand_scaling import (
    GRAD_OUTPUT,
    INPUT,
    ROLES,
    WEIGHT,
    ExpertsWatch,
    LayerScaling,
    LayerWatch,
    Operand,
    Operands,
    OperandScaling,
    inside_backward,
)
from octavo.scaling.slices import Slices
from octavo.scaling.stateful_module import StatefulModule

__all__ = [
    "EMPTY",
    "GRAD_OUTPUT",
    "INPUT",
    "ROLES",
    "WEIGHT",
    "AmaxHistory",
    "ExpertsWatch",
    "LayerScaling",
    "LayerWatch",
    "Operand",
    "OperandScaling",
    "Operands",
    "ScaleUpdates",
    "Slices",
    "StatefulModule",
    "WeightSeen",
    "inside_backward",
]

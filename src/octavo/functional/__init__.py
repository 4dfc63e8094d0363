"""The linear layer in FP8 as a function: operands cast by their roles, three GEMMs, and what backward needs of them."""

from octavo.functional.grouped_linear import fp8_grouped_linear
from octavo.functional.linear import fp8_linear, multiply
from octavo.functional.saved_operands import (
    InputOperands,
    Recompute,
    RecomputedOperand,
    WeightOperands,
    cast_input,
    cast_operand,
    quantize_operand,
)
from octavo.functional.weight_cache import OperandSource, WeightCache

__all__ = [
    "InputOperands",
    "OperandSource",
    "Recompute",
    "RecomputedOperand",
    "WeightCache",
    "WeightOperands",
    "cast_input",
    "cast_operand",
    "fp8_grouped_linear",
    "fp8_linear",
    "multiply",
    "quantize_operand",
]

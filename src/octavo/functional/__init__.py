"""The linear layer in FP8 as a function: operands cast by their roles, three GEMMs, and what backward keeps."""

from octavo.functional.linear import (
    InputOperands,
    WeightCache,
    WeightOperands,
    cast_input,
    cast_operand,
    fp8_linear,
    multiply,
)

__all__ = [
    "InputOperands",
    "WeightCache",
    "WeightOperands",
    "cast_input",
    "cast_operand",
    "fp8_linear",
    "multiply",
]

"""The linear layer in FP8 as a function: operands cast by their roles, three GEMMs, and what backward needs of them."""

from octavo.functional.linear import fp8_linear, multiply
from octavo.functional.saved_operands import InputOperands, WeightOperands, cast_input, cast_operand, quantize_operand
from octavo.functional.weight_cache import WeightCache

__all__ = [
    "InputOperands",
    "WeightCache",
    "WeightOperands",
    "cast_input",
    "cast_operand",
    "fp8_linear",
    "multiply",
    "quantize_operand",
]

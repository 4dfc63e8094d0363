"""Layers in FP8 as functions: operands cast by their roles, GEMMs forward and backward, and what backward needs."""

from octavo.functional.attention import (
    AttentionWatch,
    check_attention_recipe,
    check_attention_shapes,
    fp8_attention,
)
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
    "AttentionWatch",
    "InputOperands",
    "OperandSource",
    "Recompute",
    "RecomputedOperand",
    "WeightCache",
    "WeightOperands",
    "cast_input",
    "cast_operand",
    "check_attention_recipe",
    "check_attention_shapes",
    "fp8_attention",
    "fp8_grouped_linear",
    "fp8_linear",
    "multiply",
    "quantize_operand",
]

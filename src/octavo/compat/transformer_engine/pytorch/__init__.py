"""Transformer Engine's modules for PyTorch, on any device: its names and arguments, octavo's numbers."""

from octavo.compat.transformer_engine.pytorch.attention import DotProductAttention, MultiheadAttention
from octavo.compat.transformer_engine.pytorch.linear import LayerNorm, LayerNormLinear, LayerNormMLP, Linear, RMSNorm
from octavo.compat.transformer_engine.pytorch.precision import (
    autocast,
    checkpoint,
    fp8_autocast,
    fp8_model_init,
    quantized_model_init,
)
from octavo.compat.transformer_engine.pytorch.transformer import TransformerLayer

__all__ = [
    "DotProductAttention",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "TransformerLayer",
    "autocast",
    "checkpoint",
    "fp8_autocast",
    "fp8_model_init",
    "quantized_model_init",
]

"""Transformer Engine's PyTorch modules on any device: its names and arguments with octavo's numerics."""

from octavo.compat.transformer_engine.pytorch import fp8, ops, quantization
from octavo.compat.transformer_engine.pytorch.attention import DotProductAttention, MultiheadAttention
from octavo.compat.transformer_engine.pytorch.availability import (
    get_default_recipe,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from octavo.compat.transformer_engine.pytorch.linear import LayerNorm, LayerNormLinear, LayerNormMLP, Linear, RMSNorm
from octavo.compat.transformer_engine.pytorch.precision import (
    autocast,
    checkpoint,
    fp8_autocast,
    fp8_model_init,
    quantized_model_init,
)
from octavo.compat.transformer_engine.pytorch.transformer import TransformerLayer
from octavo.compat.transformer_engine.pytorch.unsupported import __getattr__ as __getattr__

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
    "fp8",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_recipe",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "ops",
    "quantization",
    "quantized_model_init",
]

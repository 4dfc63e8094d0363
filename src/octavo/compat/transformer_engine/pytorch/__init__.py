"""Transformer Engine's modules for PyTorch, on any device: its names and arguments, octavo's numbers."""

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
from octavo.compat.transformer_engine.pytorch.not_served import (
    CudaRNGStatesTracker,
    Float8Quantizer,
    Float8Tensor,
    GroupedLinear,
    InferenceParams,
    get_cpu_offload_context,
    make_graphed_callables,
    moe_permute,
    moe_unpermute,
    onnx_export,
    parallel_cross_entropy,
)
from octavo.compat.transformer_engine.pytorch.precision import (
    autocast,
    checkpoint,
    fp8_autocast,
    fp8_model_init,
    quantized_model_init,
)
from octavo.compat.transformer_engine.pytorch.transformer import TransformerLayer

__all__ = [
    "CudaRNGStatesTracker",
    "DotProductAttention",
    "Float8Quantizer",
    "Float8Tensor",
    "GroupedLinear",
    "InferenceParams",
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
    "get_cpu_offload_context",
    "get_default_recipe",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "make_graphed_callables",
    "moe_permute",
    "moe_unpermute",
    "onnx_export",
    "ops",
    "parallel_cross_entropy",
    "quantization",
    "quantized_model_init",
]

"""Modules whose GEMMs run in FP8, and what stands between them in a transformer."""

from octavo.nn.attention import DotProductAttention
from octavo.nn.grouped_linear import GroupedLinear
from octavo.nn.kv_cache import KVCache
from octavo.nn.layernorm_linear import LayerNormLinear
from octavo.nn.layernorm_mlp import LayerNormMLP
from octavo.nn.linear import Linear
from octavo.nn.multihead import MultiheadAttention
from octavo.nn.norms import LayerNorm, RMSNorm
from octavo.nn.parameter_rounding import rounded_parameters
from octavo.nn.rotary import RotaryScaling, rotary_table, rotate
from octavo.nn.transformer import TransformerLayer

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "KVCache",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "RotaryScaling",
    "TransformerLayer",
    "rotary_table",
    "rotate",
    "rounded_parameters",
]

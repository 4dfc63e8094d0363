"""Older name of ``quantization.py``, ``transformer_engine.pytorch.fp8``."""

from octavo.compat.transformer_engine.pytorch.quantization import (
    FP8GlobalStateManager,
    check_fp8_block_scaling_support,
    check_fp8_support,
    check_mxfp8_support,
    fp8_autocast,
    fp8_model_init,
    get_default_fp8_recipe,
    is_fp8_available,
)

__all__ = [
    "FP8GlobalStateManager",
    "check_fp8_block_scaling_support",
    "check_fp8_support",
    "check_mxfp8_support",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_fp8_recipe",
    "is_fp8_available",
]

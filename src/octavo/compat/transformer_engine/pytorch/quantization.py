"""Transformer Engine's ``quantization``: context managers, support checks and ``FP8GlobalStateManager``.

``octavo.compat.transformer_engine.pytorch.fp8`` is its older name.
"""

from typing import Any

from octavo.compat.transformer_engine.common.recipe import Recipe
from octavo.compat.transformer_engine.pytorch.availability import (
    check_fp8_block_scaling_support,
    check_fp8_support,
    check_mxfp8_support,
    check_nvfp4_support,
    get_default_fp8_recipe,
    get_default_recipe,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from octavo.compat.transformer_engine.pytorch.blocks import active_block
from octavo.compat.transformer_engine.pytorch.precision import (
    autocast,
    fp8_autocast,
    fp8_model_init,
    quantized_model_init,
)

__all__ = [
    "FP8GlobalStateManager",
    "autocast",
    "check_fp8_block_scaling_support",
    "check_fp8_support",
    "check_mxfp8_support",
    "check_nvfp4_support",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_fp8_recipe",
    "get_default_recipe",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "quantized_model_init",
]


class FP8GlobalStateManager:
    """Read-only state of the innermost ``autocast`` block.

    Example:
        >>> with autocast():
        ...     FP8GlobalStateManager.is_fp8_enabled()
        True
    """

    @staticmethod
    def reset() -> None:
        """Do nothing: a block's state ends with it."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Return True if layers run in FP8."""
        block = active_block()
        return block is not None and block.enabled

    @staticmethod
    def is_fp8_calibration() -> bool:
        """Return True if the block is calibrating."""
        block = active_block()
        return block is not None and block.calibrating

    @staticmethod
    def with_fp8_parameters() -> bool:
        """Return False: weights stay in high precision, see ``quantized_model_init``."""
        return False

    @staticmethod
    def get_fp8_recipe() -> Recipe:
        """Return the block's recipe, or the default recipe outside all blocks."""
        block = active_block()
        return get_default_recipe() if block is None else block.recipe

    @staticmethod
    def get_fp8_group() -> Any:
        """Return the block's ``amax_reduction_group``."""
        block = active_block()
        return None if block is None else block.group

    is_fp8_available = staticmethod(check_fp8_support)
    is_mxfp8_available = staticmethod(check_mxfp8_support)
    is_fp8_block_scaling_available = staticmethod(check_fp8_block_scaling_support)
    is_nvfp4_available = staticmethod(check_nvfp4_support)

"""Checks for supported recipes: all except those of FP4, on any device.

With ``return_reason`` the functions return a pair of the result and the reason, "" if supported.
"""

from octavo.compat.transformer_engine.common.recipe import DelayedScaling, Recipe

__all__ = [
    "check_fp8_block_scaling_support",
    "check_fp8_support",
    "check_mxfp8_support",
    "check_nvfp4_support",
    "get_default_fp8_recipe",
    "get_default_recipe",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
]


def check_fp8_support() -> tuple[bool, str]:
    """Return True and an empty reason: FP8 is supported on every device."""
    return True, ""


check_mxfp8_support = check_fp8_block_scaling_support = check_fp8_support


def check_nvfp4_support() -> tuple[bool, str]:
    """Return False and the reason: NVFP4 is not supported."""
    return False, "octavo computes in FP8 and has no FP4 recipe; use MXFP8BlockScaling()."


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Return True: BF16 and every FP8 recipe are supported.

    Example:
        >>> is_fp8_available(return_reason=True)
        (True, '')
    """
    return check_fp8_support() if return_reason else True


is_mxfp8_available = is_fp8_block_scaling_available = is_bf16_available = is_fp8_available


def is_nvfp4_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Return False: NVFP4 is not supported.

    Example:
        >>> is_nvfp4_available()
        False
    """
    return check_nvfp4_support() if return_reason else False


def get_default_recipe() -> Recipe:
    """Default recipe of ``autocast``: ``DelayedScaling()`` on every device."""
    return DelayedScaling()


get_default_fp8_recipe = get_default_recipe

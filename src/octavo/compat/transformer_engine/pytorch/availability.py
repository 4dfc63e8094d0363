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

Answer = bool | tuple[bool, str]


def check_fp8_support() -> tuple[bool, str]:
    """Return True and an empty reason: FP8 is supported on every device."""
    return True, ""


check_mxfp8_support = check_fp8_block_scaling_support = check_fp8_support


def check_nvfp4_support() -> tuple[bool, str]:
    """Return False and the reason: NVFP4 is not supported."""
    return False, "octavo computes in FP8 and has no FP4 recipe; use MXFP8BlockScaling()."


def is_fp8_available(return_reason: bool = False) -> Answer:
    """Return True: ``DelayedScaling`` and ``Float8CurrentScaling`` are supported.

    Example:
        >>> is_fp8_available(return_reason=True)
        (True, '')
    """
    return _answer(check_fp8_support(), return_reason)


def is_mxfp8_available(return_reason: bool = False) -> Answer:
    """Return True: ``MXFP8BlockScaling`` is supported."""
    return _answer(check_mxfp8_support(), return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> Answer:
    """Return True: ``Float8BlockScaling`` is supported."""
    return _answer(check_fp8_block_scaling_support(), return_reason)


def is_nvfp4_available(return_reason: bool = False) -> Answer:
    """Return False: NVFP4 is not supported.

    Example:
        >>> is_nvfp4_available()
        False
    """
    return _answer(check_nvfp4_support(), return_reason)


def is_bf16_available(return_reason: bool = False) -> Answer:
    """Return True: BF16 is supported."""
    return _answer((True, ""), return_reason)


def get_default_recipe() -> Recipe:
    """Default recipe of ``autocast``: ``DelayedScaling()`` on every device."""
    return DelayedScaling()


get_default_fp8_recipe = get_default_recipe


def _answer(support: tuple[bool, str], return_reason: bool) -> Answer:
    return support if return_reason else support[0]

"""Which recipes run here, as programs ask before they train: all but those of FP4, on any device.

With ``return_reason`` a question's answer is a pair: whether, and why not, "" if it can.
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
    """Whether tensors with one scale can be computed in FP8, and why not: everywhere."""
    return True, ""


check_mxfp8_support = check_fp8_block_scaling_support = check_fp8_support


def check_nvfp4_support() -> tuple[bool, str]:
    """Whether NVFP4 can be computed, and why not: nowhere."""
    return False, "octavo computes in FP8 and has no FP4 recipe; use MXFP8BlockScaling()."


def is_fp8_available(return_reason: bool = False) -> Answer:
    """Whether ``DelayedScaling`` and ``Float8CurrentScaling`` run here.

    Example:
        >>> is_fp8_available(return_reason=True)
        (True, '')
    """
    return _answer(check_fp8_support(), return_reason)


def is_mxfp8_available(return_reason: bool = False) -> Answer:
    """Whether ``MXFP8BlockScaling`` runs here."""
    return _answer(check_mxfp8_support(), return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> Answer:
    """Whether ``Float8BlockScaling`` runs here."""
    return _answer(check_fp8_block_scaling_support(), return_reason)


def is_nvfp4_available(return_reason: bool = False) -> Answer:
    """Whether NVFP4 runs here: it does not.

    Example:
        >>> is_nvfp4_available()
        False
    """
    return _answer(check_nvfp4_support(), return_reason)


def is_bf16_available(return_reason: bool = False) -> Answer:
    """Whether BF16 can be computed here."""
    return _answer((True, ""), return_reason)


def get_default_recipe() -> Recipe:
    """The recipe of an ``autocast`` that names none: ``DelayedScaling()``, on every device."""
    return DelayedScaling()


get_default_fp8_recipe = get_default_recipe


def _answer(support: tuple[bool, str], return_reason: bool) -> Answer:
    return support if return_reason else support[0]

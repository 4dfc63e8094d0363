"""Argument checks of the constructors of :mod:`octavo.nn`, and the options that they pass to their inner layers."""

from collections.abc import Iterable
from typing import TypedDict

import torch

from octavo import recipes
from octavo.errors import ConfigError
from octavo.formats import FP32
from octavo.numerics.cast_spec import check_integer
from octavo.recipes import Recipe

__all__ = [
    "LinearOptions",
    "NormOptions",
    "check_choice",
    "check_eps",
    "check_probability",
    "check_sizes",
    "check_whole",
    "linear_options",
]


class LinearOptions(TypedDict):
    """Arguments of every inner ``octavo.nn.Linear``."""

    recipe: str | Recipe
    manual_scale_updates: bool
    device: torch.device | str | None
    dtype: torch.dtype | None


class NormOptions(TypedDict):
    """Arguments of every inner norm."""

    normalization: str
    eps: float
    zero_centered: bool


def check_sizes(**sizes: object) -> None:
    """Refuse sizes that are no whole numbers of at least 1; None is a size left to its default."""
    for name, value in sizes.items():
        check_whole(name, value, least=1)


def check_whole(name: str, value: object, *, least: int) -> None:
    """Refuse what is neither a whole number of at least ``least`` nor None."""
    if value is not None:
        check_integer(name, value, least=least)


def check_choice(name: str, value: str, allowed: Iterable[str]) -> None:
    """Refuse a word that is none of ``allowed``."""
    if value not in (names := list(allowed)):
        raise ConfigError(f"{name} must be one of {', '.join(names)}, not {value!r}")


def check_probability(name: str, value: float) -> None:
    """Refuse a dropout probability outside 0 ≤ p < 1."""
    if not 0 <= value < 1:
        raise ConfigError(f"{name} must be a probability of at least 0 and under 1, not {value!r}")


def check_eps(eps: float) -> None:
    """Refuse an ``eps`` that does not keep a root away from 0 in FP32."""
    if not FP32.min_normal <= eps <= FP32.max:
        raise ConfigError(
            f"eps must be a positive number that float32 holds, {FP32.min_normal:.2e} to {FP32.max:.2e}, not {eps!r}"
        )


def linear_options(
    recipe: str | Recipe,
    manual_scale_updates: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> LinearOptions:
    """The options of the inner linear layers, their recipe looked up, so that an unknown one is refused early."""
    return {
        "recipe": recipes.get(recipe),
        "manual_scale_updates": manual_scale_updates,
        "device": device,
        "dtype": dtype,
    }

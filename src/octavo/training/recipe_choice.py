"""Names of recipes that a run can train with: its own, those of overrides, and those of phases."""

from collections.abc import Mapping
from typing import Any

from octavo import recipes
from octavo.errors import ConfigError
from octavo.numerics import Scaling
from octavo.parsing import did_you_mean
from octavo.recipes.engines import get, served_recipe

__all__ = [
    "BF16",
    "PLAIN_RECIPES",
    "check_module_casts",
    "check_overrides",
    "check_recipe",
    "check_served_by",
    "trainable_recipes",
]

BF16 = "bf16"
PLAIN_RECIPES = ("fp32", BF16)


def trainable_recipes() -> tuple[str, ...]:
    """Names of recipes for training: high precision, and every preset that needs no calibration."""
    presets = (name for name in recipes.names() if not recipes.get(name).has_static_input)
    return (*PLAIN_RECIPES, *(name for name in presets if name not in PLAIN_RECIPES))


def check_recipe(name: str, options: dict[str, Any]) -> None:
    """Check a run's recipe and its options.

    Raises:
        ConfigError: an unknown name or option.
    """
    allowed = list(trainable_recipes())
    if name not in allowed:
        raise ConfigError(
            f"training.recipe must be one of {', '.join(allowed)}, not {name!r}{did_you_mean(name, allowed)}"
        )
    if name not in PLAIN_RECIPES:
        recipes.get(name, **options)
    elif options:
        raise ConfigError(f"recipe {name!r} has no option {next(iter(options))!r}; it takes no options")


def check_module_casts(name: str, options: dict[str, Any], *, norms: bool, smooth: bool, served_by: str) -> None:
    """Check a run that casts the weights of its norms, or smooths its MLPs.

    Raises:
        ConfigError: a recipe without FP8, or norms with one whose weights have no dynamic scales; or an engine whose
            forward pass the run shall have.
    """
    for key, value in (("cast_norms", norms), ("smooth_swiglu", smooth)):
        if value and served_by:
            raise ConfigError(f"training.{key} changes the forward pass, and {served_by} does not; turn it off")
        if value and name in PLAIN_RECIPES:
            raise ConfigError(f"training.{key} needs an FP8 recipe, not {name!r}; turn it off")
    weight = recipes.get(name, **options).output.b if norms else None
    if weight is not None and weight.scaling != Scaling.DYNAMIC:
        raise ConfigError(
            f"training.cast_norms needs a recipe whose weights have dynamic scales, and {name!r} has {weight.scaling} "
            "ones; use tensorwise, rowwise, blockwise or mxfp8"
        )


def check_served_by(engine: str, recipe: str, options: Mapping[str, Any]) -> None:
    """Check the engine that a run trains for; "" is none.

    Raises:
        ConfigError: an unknown engine, one whose forward pass a run cannot have, or a recipe in high precision.
    """
    if not engine:
        return
    if recipe in PLAIN_RECIPES:
        raise ConfigError(
            f"training.as_served_by gives layers the forward pass of {engine!r}, and training.recipe their gradients "
            f"in FP8; {recipe!r} runs none in FP8, and 'weight_only' has gradients in high precision"
        )
    if served_recipe(get(engine), recipes.get(recipe, **options)).has_static_input:
        raise ConfigError(
            f"{engine} takes its inputs' scales from calibration, which a run has not; octavo qat --as-served-by "
            f"{engine} tracks them"
        )


def check_overrides(overrides: Mapping[str, str]) -> None:
    """Check the recipes of overrides; patterns are matched later, when there is a model.

    Raises:
        ConfigError: an empty pattern or an unknown recipe.
    """
    allowed = [name for name in trainable_recipes() if name != "fp32"]
    for pattern, name in overrides.items():
        if not pattern or not isinstance(pattern, str):
            raise ConfigError(
                f"training.overrides has the pattern {pattern!r}; name layers, such as 'model.layers.0.*'"
            )
        if name not in allowed:
            raise ConfigError(
                f"training.overrides[{pattern!r}] must be one of {', '.join(allowed)}, not {name!r}"
                f"{did_you_mean(str(name), allowed)}"
            )

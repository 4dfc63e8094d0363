"""Effect of configuration changes on one layer's recipe."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from octavo import recipes
from octavo.formats import E4M3, E5M2, E8M0
from octavo.numerics import Rounding, ScaleRounding
from octavo.recipes import CastSpec, GemmSpec, Recipe, Scaling, Statistic

__all__ = ["changed_recipe", "same_casts", "with_options"]

_HISTORY = {"history_length": "length", "update_interval": "update_interval", "backoff": "backoff"}
_FORMATS = {"E4M3": E4M3, "E5M2": E5M2}


def changed_recipe(recipe: Recipe, path: str, changes: Mapping[str, Any]) -> Recipe:
    """Recipe of the layer at ``path`` under changed [training] values.

    ``skip`` takes precedence over ``overrides``, and ``overrides`` over ``recipe`` and ``recipe_options``.

    Args:
        recipe: the layer's current recipe.
        path: the layer's path in its model.
        changes: values by key; keys that do not concern recipes have no effect.

    Raises:
        ConfigError: an unknown recipe, or an option's value out of range.

    Example:
        >>> from octavo import recipes
        >>> changes = {"recipe": "tensorwise", "overrides": {"layers.0.*": "rowwise"}, "skip": ["*.down_proj"]}
        >>> for path in ("layers.0.q_proj", "layers.0.down_proj", "layers.1.q_proj"):
        ...     changed_recipe(recipes.get("delayed"), path, changes).name
        'rowwise'
        'bf16'
        'tensorwise'
    """
    if any(fnmatchcase(path, pattern) for pattern in changes.get("skip", ())):
        return recipes.get("bf16")
    for pattern, name in changes.get("overrides", {}).items():
        if fnmatchcase(path, pattern):
            return recipes.get(name)
    options = changes.get("recipe_options", {})
    if "recipe" in changes:
        return recipes.get(changes["recipe"], **options)
    return with_options(recipe, options)


def with_options(recipe: Recipe, options: Mapping[str, Any]) -> Recipe:
    """``recipe`` with other values of a preset's options; options that do not apply to it are ignored.

    Example:
        >>> from octavo import recipes
        >>> recipe = recipes.get("delayed", margin=2)
        >>> with_options(recipe, {"history_length": 4}) == recipes.get("delayed", margin=2, history_length=4)
        True
        >>> with_options(recipes.get("bf16"), {"margin": 1}) == recipes.get("bf16")
        True
    """
    gradient = recipe.grad_input.a
    if gradient is not None and options.keys() & {"gradient_format", "gradient_rounding"}:
        fmt = _FORMATS[options.get("gradient_format", gradient.format.name)]
        recipe = recipe.with_gradients_in(fmt, Rounding(options.get("gradient_rounding", gradient.rounding)))
    if "margin" in options:
        recipe = _with_casts(recipe, lambda cast: cast.scaling == Scaling.DELAYED, margin=options["margin"])
    if "scale_rounding" in options:
        rounding = ScaleRounding(options["scale_rounding"])
        recipe = _with_casts(recipe, lambda cast: cast.scale_format == E8M0, scale_rounding=rounding)
    if recipe.history is not None:
        changes = {_HISTORY[name]: value for name, value in options.items() if name in _HISTORY}
        if "statistic" in options:
            changes["statistic"] = Statistic(options["statistic"])
        recipe = replace(recipe, history=replace(recipe.history, **changes))
    return recipe


def same_casts(one: Recipe, other: Recipe) -> bool:
    """True if two recipes are equal except for their names."""
    return replace(one, name="") == replace(other, name="")


def _with_casts(recipe: Recipe, is_selected: Callable[[CastSpec], bool], **changes: Any) -> Recipe:
    """``recipe`` with the changes applied to the selected casts."""

    def cast(spec: CastSpec | None) -> CastSpec | None:
        return spec and (replace(spec, **changes) if is_selected(spec) else spec)

    def gemm(spec: GemmSpec) -> GemmSpec:
        return replace(spec, a=cast(spec.a), b=cast(spec.b))

    return replace(
        recipe,
        output=gemm(recipe.output),
        grad_input=gemm(recipe.grad_input),
        grad_weight=gemm(recipe.grad_weight),
    )

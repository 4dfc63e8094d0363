"""Application of remedies to a model during training, and their reversal."""

from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from octavo.convert import linear_layers
from octavo.doctor.findings import Remedy
from octavo.doctor.recipe_changes import changed_recipe
from octavo.doctor.remedies.context import fineness
from octavo.errors import ConfigError
from octavo.functional import WeightCache
from octavo.nn.scaled_layer import ScaledLayer
from octavo.recipes import Recipe

__all__ = ["Undo", "apply_to_model", "take_back"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Undo:
    """State of a model's layers before a remedy was applied.

    Attributes:
        recipes: previous recipes of the changed layers, by path.
        cached: paths of layers that cached their weight's codes.
    """

    recipes: dict[str, Recipe] = field(default_factory=dict)
    cached: tuple[str, ...] = ()


def apply_to_model(model: nn.Module, remedy: Remedy) -> Undo:
    """Apply a remedy to a converted model's layers; :func:`take_back` reverts it.

    Changes of ``recipe``, ``recipe_options``, ``overrides``, ``skip`` and ``cache_weights`` are applied. Changes that
    concern the training loop, such as the learning rate, are ignored. No layer gets a coarser recipe. A delayed layer
    with a different history starts with an empty one. Parameters and the optimizer's state do not change. Call it
    between two steps.

    Args:
        model: a model with octavo layers.
        remedy: the remedy to apply.

    Raises:
        ConfigError: an override or a pattern to skip matches no layer, or a value is not allowed; nothing is changed.

    Example:
        >>> import octavo
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        >>> _ = octavo.convert(model, "tensorwise")
        >>> undo = apply_to_model(model, Remedy(text="", changes={"overrides": {"1": "rowwise"}}))
        >>> model[1].recipe.name, model[0].recipe.name
        ('rowwise', 'tensorwise')
        >>> take_back(model, undo)
        >>> model[1].recipe.name
        'tensorwise'
    """
    layers = linear_layers(model)
    _check_patterns(remedy, layers)
    new_recipes = {path: changed_recipe(layer.recipe, path, remedy.changes) for path, layer in layers.items()}
    changed = {path: recipe for path, recipe in new_recipes.items() if _is_finer_change(layers[path].recipe, recipe)}
    uncached = [path for path, layer in layers.items() if layer.weight_cache is not None]
    if remedy.changes.get("cache_weights", True):
        uncached = []
    undo = Undo(recipes={path: layers[path].recipe for path in changed}, cached=tuple(uncached))
    _set_recipes(layers, changed)
    for path in uncached:
        layers[path].weight_cache = None
    return undo


def take_back(model: nn.Module, undo: Undo) -> None:
    """Restore the layers to their state before :func:`apply_to_model`; a discarded history starts empty.

    Raises:
        ConfigError: the model lacks a layer.
    """
    layers = linear_layers(model)
    missing = sorted({*undo.recipes, *undo.cached} - layers.keys())
    if missing:
        raise ConfigError(f"this model has no layer {missing[0]!r}; take a remedy back where it was applied")
    _set_recipes(layers, undo.recipes)
    for path in undo.cached:
        layers[path].weight_cache = WeightCache()


def _set_recipes(layers: dict[str, ScaledLayer], recipes: dict[str, Recipe]) -> None:
    for path, recipe in recipes.items():
        layer = layers[path]
        layer.set_recipe(recipe, layer.scale_updates, path=layer.path)


def _is_finer_change(current: Recipe, new: Recipe) -> bool:
    return new != current and fineness(new.name) >= fineness(current.name)


def _check_patterns(remedy: Remedy, layers: dict[str, ScaledLayer]) -> None:
    patterns = [*remedy.changes.get("overrides", {}), *remedy.changes.get("skip", ())]
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in layers):
            examples = ", ".join(list(layers)[:3])
            raise ConfigError(f"no layer of this model is named {pattern!r}; its layers include {examples}")

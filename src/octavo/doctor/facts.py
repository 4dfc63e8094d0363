"""What is written of a layer and its recipe beside their numbers, as far as a rule asks for it."""

from typing import Any

from octavo.doctor.series import OPERANDS
from octavo.nn import Linear
from octavo.recipes import GemmSpec, Recipe

__all__ = ["layer_facts", "recipe_facts"]


def layer_facts(layer: Linear, recipe: Recipe) -> dict[str, Any]:
    """What a rule must know of a layer that runs ``recipe``."""
    shape = {"in_features": layer.in_features, "out_features": layer.out_features, "device": layer.weight.device.type}
    cached = {} if layer.weight_cache is None else {"caches_weight": True}
    return {**recipe_facts(recipe), **shape, **cached}


def recipe_facts(recipe: Recipe) -> dict[str, Any]:
    """Those that are the recipe's own.

    Example:
        >>> from octavo import recipes
        >>> facts = recipe_facts(recipes.get("delayed"))
        >>> facts["recipe"], facts["history_length"], facts["casts"]["input output"]["scaling"]
        ('delayed', 16, 'delayed')
    """
    history = recipe.history
    kept = {} if history is None else {"history_length": history.length, "statistic": str(history.statistic)}
    often = {} if history is None else {"update_interval": history.update_interval}
    return {"recipe": recipe.name, **kept, **often, "casts": _casts(recipe)}


def _casts(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """By "role gemm", what a rule must know of a cast to judge its scale."""
    found: dict[str, dict[str, Any]] = {}
    for gemm, operands in OPERANDS.items():
        product: GemmSpec = getattr(recipe, gemm)
        for role, spec in zip(operands, (product.a, product.b), strict=True):
            if spec is not None:
                found[f"{role} {gemm}"] = {
                    "format": spec.format.name,
                    "scaling": str(spec.scaling),
                    "scale_rounding": str(spec.scale_rounding),
                    "margin": spec.margin,
                }
    return found

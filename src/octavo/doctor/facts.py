"""What is written of a layer and its recipe beside their numbers, as far as a rule asks for it."""

from collections.abc import Iterator, Sequence
from math import inf
from typing import Any

from octavo.doctor.findings import Finding
from octavo.doctor.series import OPERANDS, Period
from octavo.nn import Linear
from octavo.recipes import GemmSpec, Recipe

__all__ = ["facts_during", "layer_facts", "recipe_facts"]


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


def facts_during(finding: Finding, periods: Sequence[Period]) -> Iterator[dict[str, Any]]:
    """A layer's facts in the finding's steps, oldest first; what it had at its first look holds before that too.

    Example:
        >>> from octavo.doctor.findings import Severity
        >>> periods = [Period(5.0, 0, {"recipe": "delayed"}), Period(30.0, 5, {"recipe": "bf16"})]
        >>> one = Finding(code="saturation", severity=Severity.WARN, path="0", first_step=5, last_step=25)
        >>> list(facts_during(one, periods))
        [{'recipe': 'delayed'}]
    """
    for index, period in enumerate(periods):
        until = periods[index + 1].step if index + 1 < len(periods) else inf
        is_over = max(until, period.step + 1) <= finding.first_step  # a step made again was looked at under both
        if not is_over and (period.step <= finding.last_step or not index):
            yield period.facts


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
                    "amax_floor": spec.amax_floor,
                    "rounding": str(spec.rounding),
                }
    return found

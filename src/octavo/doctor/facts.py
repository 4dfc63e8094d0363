"""Facts about a layer and its recipe that are recorded with its statistics for the rules."""

from collections.abc import Iterator, Sequence
from math import inf
from typing import Any

from octavo.doctor.findings import Finding
from octavo.doctor.series import OPERANDS, Period
from octavo.nn.scaled_layer import ScaledLayer
from octavo.recipes import GemmSpec, Recipe

__all__ = ["facts_during", "layer_facts", "recipe_facts"]


def layer_facts(layer: ScaledLayer, recipe: Recipe) -> dict[str, Any]:
    """Facts about a layer that runs ``recipe``: recipe, shape, device and weight cache."""
    device = layer.stored_weight.device.type
    shape = {"in_features": layer.in_features, "out_features": layer.out_features, "device": device}
    cached = {} if layer.weight_cache is None else {"caches_weight": True}
    return {**recipe_facts(recipe), **shape, **cached}


def recipe_facts(recipe: Recipe) -> dict[str, Any]:
    """Facts about the recipe alone.

    Example:
        >>> from octavo import recipes
        >>> facts = recipe_facts(recipes.get("delayed"))
        >>> facts["recipe"], facts["history_length"], facts["casts"]["input output"]["scaling"]
        ('delayed', 16, 'delayed')
    """
    history = recipe.history
    length_facts = {} if history is None else {"history_length": history.length, "statistic": str(history.statistic)}
    interval_facts = {} if history is None else {"update_interval": history.update_interval}
    return {"recipe": recipe.name, **length_facts, **interval_facts, "casts": _casts(recipe)}


def facts_during(finding: Finding, periods: Sequence[Period]) -> Iterator[dict[str, Any]]:
    """A layer's facts during the finding's steps, oldest first; the first ones also hold for all earlier steps.

    Example:
        >>> from octavo.doctor.findings import Severity
        >>> periods = [Period(5.0, 0, {"recipe": "delayed"}), Period(30.0, 5, {"recipe": "bf16"})]
        >>> one = Finding(code="saturation", severity=Severity.WARN, path="0", first_step=5, last_step=25)
        >>> list(facts_during(one, periods))
        [{'recipe': 'delayed'}]
    """
    for index, period in enumerate(periods):
        until = periods[index + 1].step if index + 1 < len(periods) else inf
        is_over = max(until, period.step + 1) <= finding.first_step  # a repeated step was sampled under both
        if not is_over and (period.step <= finding.last_step or not index):
            yield period.facts


def _casts(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Facts about each cast by "role gemm"."""
    casts: dict[str, dict[str, Any]] = {}
    for gemm, operands in OPERANDS.items():
        gemm_spec: GemmSpec = getattr(recipe, gemm)
        for role, spec in zip(operands, (gemm_spec.a, gemm_spec.b), strict=True):
            if spec is not None:
                casts[f"{role} {gemm}"] = {
                    "format": spec.format.name,
                    "scaling": str(spec.scaling),
                    "scale_rounding": str(spec.scale_rounding),
                    "margin": spec.margin,
                    "amax_floor": spec.amax_floor,
                    "rounding": str(spec.rounding),
                }
    return casts

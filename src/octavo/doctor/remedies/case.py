"""A finding beside the run that it was found in: what a rule about remedies asks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.doctor.facts import facts_during
from octavo.doctor.findings import Finding, Remedy
from octavo.doctor.gated import gated_linears
from octavo.doctor.series import PARAMETER_FIELDS, Series
from octavo.doctor.statistics import PRODUCT_FIELDS

__all__ = ["FINENESS", "WORDS", "Case", "fineness", "listed"]

WORDS = {  # from the coarsest recipe to the finest
    "delayed_te": "with scales from its past steps (delayed_te)",
    "delayed": "with scales from its past steps (delayed)",
    "tensorwise": "with scales from the tensors themselves (tensorwise)",
    "rowwise": "with a scale for each row (rowwise)",
    "rowwise_hp_grad_weight": "with a scale for each row, and grad_weight in high precision (rowwise_hp_grad_weight)",
    "blockwise": "with a scale for each block (blockwise)",
    "mxfp8": "with a scale for every 32 elements (mxfp8)",
    "bf16": "in BF16",
}
FINENESS = tuple(WORDS)


def fineness(recipe: str) -> int:
    """The place of a recipe's preset among all, the coarsest first; -1 for a recipe of one's own.

    Example:
        >>> fineness("rowwise, E5M2 gradients") < fineness("bf16")
        True
    """
    base = _base(recipe)
    return FINENESS.index(base) if base in FINENESS else -1


def listed(names: Sequence[str]) -> str:
    """Three names at most.

    Example:
        >>> listed(["a", "b", "c", "d"])
        'a, b and 2 more'
    """
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"


@dataclass(frozen=True, slots=True)
class Case:
    """A finding and the series of its run."""

    finding: Finding
    series: Series

    @property
    def path(self) -> str:
        """The module's."""
        return self.finding.path

    @property
    def facts(self) -> dict[str, Any]:
        """Of the layer when it was last found, of most layers the worst one; empty where it is about no layer."""
        periods = self.series.periods.get(next(iter(self.finding.places), self.path), ())
        return next(reversed(list(facts_during(self.finding, periods))), {})

    @property
    def recipe(self) -> str:
        """The preset that the layer ran then; "" where it is not known."""
        return _base(str(self.facts.get("recipe", "")))

    @property
    def gradient_format(self) -> str:
        """Of the layer's gradients; the preset's where nothing says it."""
        cast = self.facts.get("casts", {}).get("grad_output grad_input", {})
        usual = "E4M3" if fineness(self.recipe) >= fineness("rowwise") else "E5M2"
        return str(cast.get("format", usual))

    @property
    def rounds_scales_down(self) -> bool:
        """Whether a scale of the layer's may be rounded to one under which its amax does not fit."""
        roundings = {cast.get("scale_rounding", "fp32") for cast in self.facts.get("casts", {}).values()}
        return bool(roundings - {"fp32", "rceil"})

    @property
    def pattern(self) -> str:
        """The layer's path; of a module that is no layer, all of its layers; of the run, every one."""
        if not self.path:
            return "*"
        return self.path if self.facts or not self.series.layers else f"{self.path}.*"

    def evidence(self, name: str, otherwise: float) -> float:
        """A number of the finding's."""
        return self.finding.evidence.get(name, otherwise)

    def finer(self, *names: str) -> Iterable[Remedy]:
        """The finding's layers under those of these recipes that are finer than their own."""
        for name in names:
            if not self.recipe or fineness(self.recipe) < fineness(name):
                yield self.override(name)

    def override(self, name: str) -> Remedy:
        """The finding's layers under a preset."""
        what = "all layers" if self.pattern == "*" else self.pattern
        return Remedy(text=f"Run {what} {WORDS[name]}.", changes={"overrides": {self.pattern: name}})

    def down_projections(self) -> list[str]:
        """Layers of the gated MLP at the path that take what gate and up projection make."""
        if self.finding.places:
            return []
        beginning = f"{self.path}." if self.path else ""
        shapes = {
            name.removeprefix(beginning): (int(facts.get("out_features", 0)), int(facts.get("in_features", 0)))
            for name, facts in self.series.layers.items()
            if name.startswith(beginning)
        }
        return [f"{beginning}{name}" for name in gated_linears(shapes)[1]]

    def noisiest(self) -> str | None:
        """The layer whose grad_weight GEMM adds more than half of the newest sample's noise, if one does."""
        products, parameters = self.series.products, self.series.parameters
        if not len(products.steps) or not len(parameters.steps):
            return None
        column = PARAMETER_FIELDS.index("grad_norm")
        norms = dict(zip(parameters.keys, parameters.values[-1, :, column], strict=True))
        ratios = products.values[-1, :, PRODUCT_FIELDS.index("sqnr_db")]
        noise = {
            key.path: float(np.nan_to_num(norms.get(f"{key.path}.weight", 0.0) ** 2 * 10 ** (-ratio / 10)))
            for key, ratio in zip(products.keys, ratios, strict=True)
            if key.gemm == "grad_weight"
        }
        loudest = max(noise, key=lambda path: noise[path], default=None)
        return loudest if loudest is not None and noise[loudest] > sum(noise.values()) / 2 else None


def _base(recipe: str) -> str:
    """The preset that a recipe's name begins with."""
    return recipe.partition(", ")[0]

"""Context of a finding for the rules that select remedies."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.doctor.facts import facts_during
from octavo.doctor.findings import Finding, Remedy
from octavo.doctor.gated import gated_linears
from octavo.doctor.series import Series
from octavo.doctor.tables import Floats

__all__ = ["FINENESS", "RECIPE_PHRASES", "RemedyContext", "fineness", "join_names"]

RECIPE_PHRASES = {  # from the coarsest recipe to the finest
    "article": "with the mean of its past scales (article)",
    "delayed_te": "with scales from its past steps (delayed_te)",
    "delayed": "with scales from its past steps (delayed)",
    "tensorwise": "with scales from the tensors themselves (tensorwise)",
    "rowwise": "with a scale for each row (rowwise)",
    "rowwise_hp_grad_weight": "with a scale for each row, and grad_weight in high precision (rowwise_hp_grad_weight)",
    "blockwise": "with a scale for each block (blockwise)",
    "mxfp8": "with a scale for every 32 elements (mxfp8)",
    "bf16": "in BF16",
}
FINENESS = tuple(RECIPE_PHRASES)


def fineness(recipe: str) -> int:
    """Rank of a recipe's preset, the coarsest first; -1 for a custom recipe.

    Example:
        >>> fineness("rowwise, E5M2 gradients") < fineness("bf16")
        True
    """
    base = _preset_of(recipe)
    return FINENESS.index(base) if base in FINENESS else -1


def join_names(names: Sequence[str]) -> str:
    """Join names, abbreviating more than three.

    Example:
        >>> join_names(["a", "b", "c", "d"])
        'a, b and 2 more'
    """
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"


@dataclass(frozen=True, slots=True)
class RemedyContext:
    """A finding with the series of its run."""

    finding: Finding
    series: Series

    @property
    def path(self) -> str:
        """The module's path."""
        return self.finding.path

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the layer at the finding's last step; empty for a finding about no layer.

        For a finding about most layers, facts about the worst layer that still ran in FP8: a layer that has moved to
        BF16 needs no remedy.
        """
        facts_by_layer = [self._last_facts(path) for path in self.finding.places or (self.path,)]
        return next(
            (facts for facts in facts_by_layer if facts and _preset_of(str(facts.get("recipe"))) != FINENESS[-1]),
            facts_by_layer[0],
        )

    def _last_facts(self, path: str) -> dict[str, Any]:
        return next(reversed(list(facts_during(self.finding, self.series.periods.get(path, ())))), {})

    @property
    def recipe(self) -> str:
        """Preset that the layer ran then; "" if unknown."""
        return _preset_of(str(self.facts.get("recipe", "")))

    @property
    def gradient_format(self) -> str:
        """Format of the layer's gradients; the preset's default if it was not recorded."""
        cast = self.facts.get("casts", {}).get("grad_output grad_input", {})
        default = "E4M3" if fineness(self.recipe) >= fineness("rowwise") else "E5M2"
        return str(cast.get("format", default))

    @property
    def rounds_scales_down(self) -> bool:
        """True if the layer may round a scale down, so that its amax exceeds the range."""
        roundings = {cast.get("scale_rounding", "fp32") for cast in self.facts.get("casts", {}).values()}
        return bool(roundings - {"fp32", "rceil"})

    @property
    def pattern(self) -> str:
        """Pattern of the finding's layers: the layer itself, all layers of a module, or all of the run."""
        if not self.path:
            return "*"
        return self.path if self.facts or not self.series.layers else f"{self.path}.*"

    def evidence(self, name: str, otherwise: float) -> float:
        """Number in the finding's evidence, or ``otherwise``."""
        return self.finding.evidence.get(name, otherwise)

    def finer(self, *names: str) -> Iterable[Remedy]:
        """Yield an override for each of these recipes that is finer than the layer's own."""
        for name in names:
            if not self.recipe or fineness(self.recipe) < fineness(name):
                yield self.override(name)

    def override(self, name: str) -> Remedy:
        """Remedy that runs the finding's layers with a preset."""
        what = "all layers" if self.pattern == "*" else self.pattern
        return Remedy(text=f"Run {what} {RECIPE_PHRASES[name]}.", changes={"overrides": {self.pattern: name}})

    def down_projections(self) -> list[str]:
        """Down projections of the gated MLP at the finding's path."""
        return [] if self.finding.places else self._down_projections_of(self.path)

    @property
    def includes_down_projection(self) -> bool:
        """True if one of the finding's layers is the down projection of a gated MLP."""
        paths = self.finding.places or (self.path,)
        return any(path in self._down_projections_of(path.rpartition(".")[0]) for path in paths)

    def _down_projections_of(self, module: str) -> list[str]:
        shapes = {
            path.removeprefix(f"{module}."): (int(facts.get("out_features", 0)), int(facts.get("in_features", 0)))
            for path, facts in self.series.layers.items()
            if path.rpartition(".")[0] == module
        }
        return [f"{module}.{name}".removeprefix(".") for name in gated_linears(shapes)[1]]

    def noisiest_layer(self) -> str | None:
        """Layer whose grad_weight GEMM adds more than half of the noise in the finding's steps, or None.

        Layers that ran in high precision at the last of these steps are ignored.
        """
        products, parameters = self.series.products, self.series.parameters
        in_steps = (products.steps >= self.finding.first_step) & (products.steps <= self.finding.last_step)
        if not in_steps.any():
            return None
        norms = dict(zip(parameters.keys, parameters.of("grad_norm")[in_steps].T, strict=True))
        noise = {
            key.path: _noise_energy(norms.get(f"{key.path}.weight", np.zeros(1)), ratios)
            for key, ratios in zip(products.keys, products.of("sqnr_db")[in_steps].T, strict=True)
            if key.gemm == "grad_weight" and np.isfinite(ratios[-1])
        }
        noisiest = max(noise, key=lambda path: noise[path], default=None)
        return noisiest if noisiest is not None and noise[noisiest] > sum(noise.values()) / 2 else None


def _noise_energy(norms: Floats, ratios: Floats) -> float:
    """Energy of the noise in gradients with these norms and SQNRs in decibels; unknown values count as 0."""
    energy = norms**2 * 10 ** (-ratios / 10)
    return float(energy[np.isfinite(energy)].sum())


def _preset_of(recipe: str) -> str:
    """Preset at the start of a recipe's name."""
    return recipe.partition(", ")[0]

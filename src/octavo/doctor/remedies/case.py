"""A finding beside the run that it was found in: what a rule about remedies asks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.doctor.facts import facts_during
from octavo.doctor.findings import Finding, Remedy
from octavo.doctor.gated import gated_linears
from octavo.doctor.series import Series
from octavo.doctor.tables import Floats

__all__ = ["FINENESS", "WORDS", "Case", "fineness", "listed"]

WORDS = {  # from the coarsest recipe to the finest
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
        """Of the layer when it was last found; empty where it is about no layer.

        Of most layers, those of the worst one that was in FP8 to the last: what has gone to BF16 needs no remedy.
        """
        known = [self._last_facts(path) for path in self.finding.places or (self.path,)]
        return next((facts for facts in known if facts and _base(str(facts.get("recipe"))) != FINENESS[-1]), known[0])

    def _last_facts(self, path: str) -> dict[str, Any]:
        return next(reversed(list(facts_during(self.finding, self.series.periods.get(path, ())))), {})

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

    @property
    def has_gate(self) -> bool:
        """Whether a layer of the finding's reads what a gated MLP's gate and up projection make."""
        paths = self.finding.places or (self.path,)
        return any(self._is_behind_a_gate(path) for path in paths)

    def _is_behind_a_gate(self, path: str) -> bool:
        parent = path.rpartition(".")[0]
        beginning = f"{parent}." if parent else ""
        shapes = {
            name.removeprefix(beginning): (int(facts.get("out_features", 0)), int(facts.get("in_features", 0)))
            for name, facts in self.series.layers.items()
            if name.rpartition(".")[0] == parent
        }
        return path.removeprefix(beginning) in gated_linears(shapes)[1]

    def noisiest(self) -> str | None:
        """The layer whose grad_weight GEMM adds more than half of the noise in the finding's steps, if one does.

        Layers that were in high precision at the last of them add none any more.
        """
        products, parameters = self.series.products, self.series.parameters
        looks = (products.steps >= self.finding.first_step) & (products.steps <= self.finding.last_step)
        if not looks.any():
            return None
        norms = dict(zip(parameters.keys, parameters.of("grad_norm")[looks].T, strict=True))
        noise = {
            key.path: _energy(norms.get(f"{key.path}.weight", np.zeros(1)), ratios)
            for key, ratios in zip(products.keys, products.of("sqnr_db")[looks].T, strict=True)
            if key.gemm == "grad_weight" and np.isfinite(ratios[-1])
        }
        loudest = max(noise, key=lambda path: noise[path], default=None)
        return loudest if loudest is not None and noise[loudest] > sum(noise.values()) / 2 else None


def _energy(norms: Floats, ratios: Floats) -> float:
    """Of the noise in gradients of these norms and SQNRs in decibels; what is not known adds none."""
    energy = norms**2 * 10 ** (-ratios / 10)
    return float(energy[np.isfinite(energy)].sum())


def _base(recipe: str) -> str:
    """The preset that a recipe's name begins with."""
    return recipe.partition(", ")[0]

"""Quantization schemes of linear layers that checkpoint formats can describe and servers can run.

| a scale of the weight for each | inputs                                | known as                         |
|--------------------------------|---------------------------------------|----------------------------------|
| tensor, row, 128x128 block     | high precision                        | weight-only, W8A16               |
| tensor, row                    | one scale from calibration            | static                           |
| tensor, row                    | a scale a token, from this token      | dynamic, per token               |
| 128x128 block                  | a scale for 1x128, from those numbers | dynamic, per group; DeepSeek's   |

A recipe also defines the rounding and the amax of dynamic scales, which no format can describe. Servers compute them
alike: the amax of each token (or group) over 448, in FP32. :func:`served` converts a recipe accordingly. The weight's
codes and scales are stored in the file and do not change.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from octavo import recipes
from octavo.errors import ConfigError
from octavo.formats import E4M3, FP32
from octavo.numerics import Granularity, PerBlock, PerRow, PerTensor
from octavo.recipes import CastSpec, GemmSpec, Recipe, Scaling

__all__ = ["BLOCK", "GROUP", "Inputs", "Scheme", "scheme_of", "served"]

BLOCK, GROUP = PerBlock(128, 128), PerBlock(1, 128)
WEIGHTS: dict[Granularity, str] = {PerTensor(): "tensor", PerRow(): "row", BLOCK: "128x128"}


class Inputs(StrEnum):
    """Cast of a layer's input."""

    HIGH_PRECISION = "in high precision"
    STATIC = "with one scale from calibration"
    TOKEN = "with a scale a token"
    GROUP = "with a scale for each 1x128"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Cast of a layer's weight and input: a row of the module's table.

    Attributes:
        weight: granularity of the weight's scales.
        inputs: cast of the input.
    """

    weight: Granularity
    inputs: Inputs

    def __str__(self) -> str:
        return (
            f"weights with a scale a {WEIGHTS[self.weight].replace('128x128', '128x128 block')}, inputs {self.inputs}"
        )

    @property
    def recipe(self) -> Recipe:
        """Recipe of a layer loaded with this scheme; its gradients are in high precision."""
        if self.inputs is Inputs.STATIC:
            return recipes.get("static", weight_granularity=WEIGHTS[self.weight])
        if self.inputs is Inputs.HIGH_PRECISION:
            return recipes.get("weight_only", granularity=WEIGHTS[self.weight])
        cast = CastSpec(format=E4M3, granularity=PerRow() if self.inputs is Inputs.TOKEN else GROUP)
        plain = GemmSpec(a=None, b=None)
        return Recipe(
            name=f"served {WEIGHTS[self.weight]}",
            output=GemmSpec(a=cast, b=CastSpec(format=E4M3, granularity=self.weight)),
            grad_input=plain,
            grad_weight=plain,
        )


def scheme_of(recipe: Recipe) -> Scheme:
    """Scheme for serving the layers of a recipe.

    Raises:
        ConfigError: no scheme describes the recipe's weights or inputs.

    Example:
        >>> from octavo import recipes
        >>> print(scheme_of(recipes.get("tensorwise")))
        weights with a scale a tensor, inputs with a scale a token
    """
    a, b = recipe.output.a, recipe.output.b
    if b is None:
        raise ConfigError(f"recipe {recipe.name!r} casts no weight, so there is nothing in FP8 to write")
    for cast in (b,) if a is None else (a, b):
        if cast.format != E4M3 or cast.scale_format != FP32:
            raise ConfigError(
                f"recipe {recipe.name!r} casts to {cast.format} with {cast.scale_format} scales; checkpoint formats "
                "have E4M3 with FP32 scales"
            )
    if b.granularity not in WEIGHTS:
        raise ConfigError(
            f"recipe {recipe.name!r} has a scale for each {b.granularity} of a weight; checkpoint formats have one for "
            f"each {', '.join(WEIGHTS.values())}"
        )
    if a is None:
        return Scheme(weight=b.granularity, inputs=Inputs.HIGH_PRECISION)
    if a.scaling is Scaling.STATIC:
        return Scheme(weight=b.granularity, inputs=Inputs.STATIC)
    return Scheme(weight=b.granularity, inputs=Inputs.GROUP if b.granularity == BLOCK else Inputs.TOKEN)


def served(recipe: Recipe) -> Recipe:
    """Recipe that a server runs for a layer of ``recipe``: the same weight cast, and inputs of the scheme.

    Example:
        >>> from octavo import recipes
        >>> served(recipes.get("rowwise")).output.a.scale_rounding
        <ScaleRounding.FP32: 'fp32'>
    """
    b = recipe.output.b
    scheme_recipe = scheme_of(recipe).recipe
    assert b is not None
    if b.scaling is not Scaling.DYNAMIC:
        b = replace(b, scaling=Scaling.DYNAMIC)  # as octavo.nn.fp8_weight.store_weight_as_codes does
    return replace(scheme_recipe, output=replace(scheme_recipe.output, b=b))

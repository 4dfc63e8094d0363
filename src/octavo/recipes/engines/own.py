"""octavo's own: any recipe as a profile, and the two that serve."""

import torch

from octavo.errors import ConfigError
from octavo.formats import E4M3
from octavo.numerics import Accumulate, CastSpec, Nonfinite, PerBlock, PerRow, Rounding, ScaleRounding
from octavo.numerics.engine_cast import AmaxOf, Division, EngineCast, PowerOfTwo, Saturation
from octavo.recipes.engines.profile import EngineProfile, Source
from octavo.recipes.specs import Recipe

__all__ = ["OWN", "profile_of_recipe"]

TEST = "tests/unit/engines/test_own.py"
SOURCE = Source(project="octavo", version="this", file="src/octavo/numerics/quantized.py", test=TEST)
REST = Source(project="octavo", version="this", file="src/octavo/functional/linear.py", test=TEST)
SOURCES = {"weight": SOURCE, "input": SOURCE} | dict.fromkeys(
    ("requantizes", "activations", "fused_cast", "products", "accumulate", "output", "head", "kv_cache", "skipped"),
    REST,
)
POWERS = {ScaleRounding.FP32: PowerOfTwo.NONE, ScaleRounding.RCEIL: PowerOfTwo.ENCODE_DOWN}


def profile_of_recipe(recipe: Recipe, *, activations: torch.dtype = torch.float32) -> EngineProfile:
    """Profile of a recipe's forward pass.

    Args:
        recipe: of the layers; a weight must be cast.
        activations: dtype of the activations.

    Raises:
        ConfigError: no weight is cast, or a cast has a margin, rounds at random, or rounds its scale as MX's floor.

    Example:
        >>> from octavo import recipes
        >>> profile_of_recipe(recipes.get("blockwise")).input.power_of_two
        <PowerOfTwo.ENCODE_DOWN: 'encode scale down, by bits'>
    """
    a, b = recipe.output.a, recipe.output.b
    if b is None:
        raise ConfigError(f"recipe {recipe.name!r} casts no weight; a profile is of a recipe in FP8")
    return EngineProfile(
        name=f"octavo-{recipe.name}",
        engine=f"octavo, {recipe.name}",
        weight=_cast(b),
        input=None if a is None else _cast(a),
        activations=activations,
        output=activations,
        accumulate=recipe.output.accumulate if recipe.emulate_tensor_cores else Accumulate.FP32,
        sources=SOURCES,
    )


def _cast(spec: CastSpec) -> EngineCast:
    if spec.engine is not None:
        return spec.engine
    if spec.margin or spec.rounding != Rounding.NEAREST or spec.scale_rounding not in POWERS:
        raise ConfigError(f"a profile's casts have no margin, round to nearest and their scales up, unlike {spec}")
    return EngineCast(
        format=spec.format,
        granularity=spec.granularity,
        scaling=spec.scaling,
        amax_of=AmaxOf.FINITE,
        amax_floor=spec.amax_floor,
        division=Division.LIMIT_BY_AMAX,
        divided_in=torch.float64,
        power_of_two=POWERS[spec.scale_rounding],
        scale_format=spec.scale_format,
        infinite_encode=torch.float32,
        saturation=Saturation.PROPAGATE if spec.nonfinite == Nonfinite.PROPAGATE else Saturation.SATURATE,
    )


def _served(name: str, input_cast: CastSpec, weight: CastSpec) -> EngineProfile:
    return EngineProfile(
        name=name,
        engine=f"octavo serve, fp8-dynamic, {'blocks' if isinstance(weight.granularity, PerBlock) else 'rows'}",
        weight=_cast(weight),
        input=_cast(input_cast),
        activations=torch.float32,
        output=torch.float32,
        sources=SOURCES,
    )


def _e4m3(granularity: PerRow | PerBlock) -> CastSpec:
    return CastSpec(format=E4M3, granularity=granularity)


OWN = (
    _served("octavo-token", _e4m3(PerRow()), _e4m3(PerRow())),
    _served("octavo-block", _e4m3(PerBlock(1, 128)), _e4m3(PerBlock(128, 128))),
)

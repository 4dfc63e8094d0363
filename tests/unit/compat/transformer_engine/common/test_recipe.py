from dataclasses import FrozenInstanceError

import pytest

from octavo import recipes
from octavo.compat.transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
)
from octavo.errors import ConfigError
from octavo.formats import E4M3, E5M2
from octavo.numerics import PerBlock, PerTensor, ScaleRounding
from octavo.recipes import Close, Scaling, Statistic

ALL = [DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling]
TILE, BLOCK, GROUP, TENSOR = PerBlock(1, 128), PerBlock(128, 128), PerBlock(1, 32), PerTensor()

# Of every GEMM: the formats and granularities of its two operands.
PER_TENSOR = [
    ((E4M3, TENSOR), (E4M3, TENSOR)),
    ((E5M2, TENSOR), (E4M3, TENSOR)),
    ((E5M2, TENSOR), (E4M3, TENSOR)),
]
PUBLISHED = {
    DelayedScaling: PER_TENSOR,
    Float8CurrentScaling: PER_TENSOR,
    Float8BlockScaling: [((E4M3, TILE), (E4M3, BLOCK)), ((E4M3, TILE), (E4M3, BLOCK)), ((E4M3, TILE), (E4M3, TILE))],
    MXFP8BlockScaling: [((E4M3, GROUP), (E4M3, GROUP))] * 3,
}


def _gemms(recipe):
    return [recipe.output, recipe.grad_input, recipe.grad_weight]


@pytest.mark.parametrize("kind", ALL)
def test_defaults_are_the_published_ones(kind):
    found = [tuple((c.format, c.granularity) for c in (g.a, g.b)) for g in _gemms(kind().octavo_recipe())]
    assert found == PUBLISHED[kind]


def test_delayed_scaling_is_the_preset():
    recipe = DelayedScaling().octavo_recipe()
    assert recipe == recipes.get("delayed_te")
    assert recipe.history is not None
    assert (recipe.history.length, recipe.history.statistic, recipe.history.close) == (
        1024,
        Statistic.MAX,
        Close.AUTOCAST,
    )
    assert all(cast.scaling == Scaling.DELAYED and cast.margin == 0 for cast in recipe.casts)


def test_delayed_options():
    recipe = DelayedScaling(margin=2, amax_history_len=4, amax_compute_algo="most_recent").octavo_recipe()
    assert recipe.history is not None
    assert (recipe.history.length, recipe.history.statistic) == (4, Statistic.LATEST)
    assert {cast.margin for cast in recipe.casts} == {2}


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(("fp8_format", "gradient"), [(Format.E4M3, E4M3), (Format.HYBRID, E5M2)])
def test_the_format_is_the_gradients(kind, fp8_format, gradient):
    recipe, default = kind(fp8_format=fp8_format).octavo_recipe(), kind().octavo_recipe()
    assert recipe.grad_input.a.format == recipe.grad_weight.a.format == gradient
    assert all(c.format == E4M3 for c in (recipe.output.a, recipe.output.b, recipe.grad_input.b, recipe.grad_weight.b))
    assert (recipe == default) == (recipe.name == default.name), "two recipes of one name"
    assert recipe.grad_input.a.granularity == default.grad_input.a.granularity


def test_rounding_options_and_floors():
    rounded = Float8CurrentScaling(use_power_2_scales=True).octavo_recipe()
    assert {cast.scale_rounding for cast in rounded.casts} == {ScaleRounding.RCEIL}
    assert {c.scale_rounding for c in Float8BlockScaling().octavo_recipe().casts} == {ScaleRounding.RCEIL}
    assert {c.scale_rounding for c in Float8BlockScaling(use_f32_scales=True).octavo_recipe().casts} == {
        ScaleRounding.FP32
    }
    for recipe in (rounded, Float8BlockScaling().octavo_recipe()):
        assert {cast.amax_floor for cast in recipe.casts} == {0.0}


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (DelayedScaling, {"amax_compute_algo": "mean"}),
        (DelayedScaling, {"scaling_factor_compute_algo": "max"}),
        (DelayedScaling, {"amax_history_len": 0}),
        (DelayedScaling, {"margin": -1}),
        (DelayedScaling, {"interval": 4}),
        (MXFP8BlockScaling, {"margin": 1}),
        (Float8BlockScaling, {"x_block_scaling_dim": 2}),
        (Float8BlockScaling, {"w_block_scaling_dim": 1}),
        *((kind, {"fp8_format": wrong}) for kind in ALL for wrong in (Format.E5M2, Format.E2M1)),
        *((kind, {"fp8_dpa": True}) for kind in ALL),
        *((kind, {"backward_override": "dequantized"}) for kind in ALL),
    ],
)
def test_unsupported_options_are_refused_at_construction(kind, arguments):
    with pytest.raises(ConfigError):
        kind(**arguments)


def test_recipes_cannot_be_changed():
    """A shared recipe object that a constructor changed once turned E5M2 gradients into E4M3."""
    with pytest.raises(FrozenInstanceError):
        DelayedScaling().fp8_format = Format.E4M3  # type: ignore[misc]


@pytest.mark.parametrize("kind", ALL)
def test_classmethods_identify_the_recipe(kind):
    names = {
        "delayed": DelayedScaling,
        "float8_current_scaling": Float8CurrentScaling,
        "float8_block_scaling": Float8BlockScaling,
        "mxfp8": MXFP8BlockScaling,
    }
    for recipe in (kind, kind()):
        assert [own for name, own in names.items() if getattr(recipe, name)()] == [kind]
        assert [recipe.nvfp4(), recipe.custom(), recipe.mxfp4_qat()] == [False] * 3
        assert recipe.float8_per_tensor_scaling() == (kind in (DelayedScaling, Float8CurrentScaling))


def test_a_formats_value_has_its_largest_numbers():
    assert Format.HYBRID.value == (E4M3.max, E5M2.max)
    assert (Format.HYBRID.value.fwd, Format.HYBRID.value.bwd) == (448, 57344)
    assert (Format.E4M3.value.bwd, Format.E5M2.value.fwd) == (448, 57344)
    assert (Format.HYBRID.value.max_fwd, Format.HYBRID.value.max_bwd) == (448, 57344)
    assert {each.name for each in Format} == {"E2M1", "E4M3", "E5M2", "HYBRID"}


def test_a_recipe_with_functions_is_itself_again_and_no_other():
    def mean(history):
        return history.mean()

    recipe = DelayedScaling(amax_compute_algo=mean).octavo_recipe()
    assert recipe == DelayedScaling(amax_compute_algo=mean).octavo_recipe()
    assert recipe != DelayedScaling(amax_compute_algo=lambda history: history.mean()).octavo_recipe()
    assert recipe != DelayedScaling().octavo_recipe()
    with pytest.raises(ConfigError, match=r"function.*which a file cannot hold"):
        recipes.to_toml(recipe)

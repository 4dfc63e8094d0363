import pytest

from octavo import recipes
from octavo.checkpoints.schemes import BLOCK, GROUP, Inputs, Scheme, scheme_of, served
from octavo.errors import ConfigError
from octavo.numerics import PerRow, PerTensor, ScaleRounding
from octavo.recipes import Scaling

EXPECTED = {
    "tensorwise": Scheme(weight=PerTensor(), inputs=Inputs.TOKEN),
    "delayed": Scheme(weight=PerTensor(), inputs=Inputs.TOKEN),
    "rowwise": Scheme(weight=PerRow(), inputs=Inputs.TOKEN),
    "blockwise": Scheme(weight=BLOCK, inputs=Inputs.GROUP),
    "static": Scheme(weight=PerTensor(), inputs=Inputs.STATIC),
    "weight_only": Scheme(weight=PerRow(), inputs=Inputs.HIGH_PRECISION),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_presets(name):
    assert scheme_of(recipes.get(name)) == EXPECTED[name]
    assert scheme_of(EXPECTED[name].recipe) == EXPECTED[name]


def test_recipes_without_an_fp8_weight_scheme_are_refused():
    with pytest.raises(ConfigError, match="E8M0 scales"):
        scheme_of(recipes.get("mxfp8"))
    with pytest.raises(ConfigError, match="casts no weight"):
        scheme_of(recipes.get("bf16"))


def casts_of(recipe):
    assert recipe.output.a is not None
    assert recipe.output.b is not None
    return recipe.output


def test_served_keeps_the_weights_and_drops_what_servers_do_not_know():
    now = casts_of(served(recipes.get("blockwise")))
    assert now.b == recipes.get("blockwise").output.b
    assert now.a.granularity == GROUP
    assert now.a.scale_rounding is ScaleRounding.FP32
    assert casts_of(served(recipes.get("delayed"))).b.scaling is Scaling.DYNAMIC
    assert casts_of(served(recipes.get("tensorwise"))).a.granularity == PerRow()


def test_words():
    assert str(EXPECTED["blockwise"]) == "weights with a scale a 128x128 block, inputs with a scale for each 1x128"

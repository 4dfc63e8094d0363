"""What octavo.compat hands out is exactly this."""

import pytest

from octavo import compat
from octavo.compat.transformer_engine import common, pytorch
from octavo.compat.transformer_engine.pytorch.unsupported import NOT_SERVED
from octavo.errors import ConfigError

MODULES = {
    "DotProductAttention", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "MultiheadAttention", "RMSNorm",
    "TransformerLayer",
}  # fmt: skip
FUNCTIONS = {
    "autocast", "checkpoint", "fp8_autocast", "fp8_model_init", "get_default_recipe", "is_bf16_available",
    "is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available", "is_nvfp4_available",
    "quantized_model_init",
}  # fmt: skip
SUBMODULES = {"fp8", "ops", "quantization"}
RECIPES = {"DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "Format", "MXFP8BlockScaling", "Recipe"}
REFUSED_RECIPES = {"CustomRecipe", "MXFP4QATFloat8BlockScaling", "MXFP4QATMXFP8BlockScaling", "NVFP4BlockScaling"}


def test_names():
    assert compat.__all__ == ["DynamicScaler", "ScalingState"]
    assert set(pytorch.__all__) == MODULES | FUNCTIONS | SUBMODULES
    assert set(common.recipe.__all__) == RECIPES | REFUSED_RECIPES


@pytest.mark.parametrize("name", sorted(NOT_SERVED))
def test_a_name_that_octavo_cannot_serve_is_refused_when_it_is_called(name):
    with pytest.raises(ConfigError, match=f"octavo has no {name}: ."):
        getattr(pytorch, name)(8, 8)
    assert getattr(pytorch, name) is getattr(pytorch, name)


def test_unknown_name_is_an_attribute_error():
    assert not hasattr(pytorch, "Convolution")
    assert not NOT_SERVED.keys() & (MODULES | FUNCTIONS)


def test_unsupported_names_can_be_imported():
    from octavo.compat.transformer_engine.pytorch import GroupedLinear

    assert not isinstance(pytorch.Linear(4, 4), GroupedLinear)


@pytest.mark.parametrize("name", sorted(REFUSED_RECIPES))
def test_a_recipe_that_octavo_cannot_serve_is_refused_when_it_is_built(name):
    kind = getattr(common.recipe, name)
    with pytest.raises(ConfigError, match=f"octavo has no {name}: .*(MXFP8BlockScaling|octavo.recipes)"):
        kind(fp4_format=common.recipe.Format.E2M1)
    assert not isinstance(common.recipe.DelayedScaling(), kind)

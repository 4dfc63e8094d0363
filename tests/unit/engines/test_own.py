"""octavo's own profiles give the codes, scales and outputs of octavo's own casts and layers, bit for bit."""

import pytest
import torch

import octavo
from octavo import recipes
from octavo.engines import linear_as, profile_of_recipe, quantize_as
from octavo.errors import ConfigError
from octavo.formats import E4M3
from octavo.functional import quantize_operand
from octavo.numerics import PerBlock, PerRow
from tests.oracle.engines.adversarial import FINITE, finite_tensors, input_cast, nonfinite_tensors, same_codes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8", "rowwise_hp_grad_weight")


@pytest.mark.parametrize("role", ["weight", "input"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_casts_of_recipes(recipe, role, dtype):
    recipe = recipes.get(recipe)
    profile, spec = profile_of_recipe(recipe), recipe.output.b if role == "weight" else recipe.output.a
    for name, x in (finite_tensors(dtype) | nonfinite_tensors(dtype)).items():
        ours, expected = quantize_as(x, getattr(profile, role)), quantize_operand(x, spec)
        assert torch.equal(ours.scale, expected.scale), name
        assert same_codes(ours.data, expected.data), name
        assert ours.granularity == expected.granularity


@pytest.mark.parametrize(("engine", "granularity"), [("octavo-token", PerRow()), ("octavo-block", PerBlock(1, 128))])
def test_casts_of_the_server(engine, granularity):
    for name in FINITE:
        x = finite_tensors(torch.float32)[name]
        expected = octavo.quantize(x, E4M3, granularity=granularity)
        ours = quantize_as(x, input_cast(engine))
        assert torch.equal(ours.scale, expected.scale)
        assert same_codes(ours.data, expected.data)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_of_recipes(recipe, dtype):
    generator = torch.Generator().manual_seed(1)
    layer = torch.nn.Linear(256, 48, dtype=dtype)
    x = torch.randn(2, 5, 256, generator=generator).to(dtype)
    model = torch.nn.Sequential(layer)
    profile = profile_of_recipe(recipes.get(recipe), activations=dtype)
    expected = linear_as(x, layer.weight, profile, bias=layer.bias)
    octavo.convert(model, recipe, convert_head=True)
    with torch.no_grad():
        assert torch.equal(model(x), expected)


def test_recipes_without_a_profile_are_refused():
    with pytest.raises(ConfigError, match="casts no weight"):
        profile_of_recipe(recipes.get("bf16"))
    with pytest.raises(ConfigError, match="have no margin"):
        profile_of_recipe(recipes.get("mxfp8", scale_rounding="floor"))

"""One BF16 model for every comparison: a checkpoint's weights, whoever measures."""

import copy

import pytest
import torch

from octavo import convert
from octavo.errors import ConfigError
from octavo.language_model import logits_of
from octavo.nn.fp8_weight import FP8WeightLinear
from octavo.quantization.bf16 import round_to_bf16
from octavo.quantization.comparison.variants import RECIPES, from_recipe, high_precision
from octavo.quantization.sensitivity.bf16_reference import in_bf16
from octavo.quantization.sensitivity.mix import Mix
from octavo.quantization.sensitivity.units import mixed, units_of
from tests.unit.quantization.tiny_models import language_model, windows

TOKENS = windows(2)


def test_every_parameter_is_that_of_a_checkpoint():
    """As saving in BF16 and reading again has them; norms and biases too, and what is shared stays shared."""
    model = language_model().model
    checkpoint = copy.deepcopy(model).bfloat16().float()
    round_to_bf16(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), checkpoint.parameters(), strict=True))
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 65504.0), (torch.float32, 3.4e38)])
def test_a_value_that_would_become_infinite_is_refused_and_nothing_has_changed(dtype, value):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).to(dtype)
    weight = model.get_parameter("1.weight").data
    weight[0, 0] = -value
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ConfigError, match=r"parameter '1\.weight' has a value whose nearest BF16 value is infinite"):
        round_to_bf16(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    weight[0, 0] = -0.99 * value
    round_to_bf16(model)


def test_codes_stay():
    layer = torch.nn.Linear(4, 4).requires_grad_(False)
    model = torch.nn.Sequential(layer)
    convert(model, frozen="fp8")
    assert isinstance(layer, FP8WeightLinear)
    before = layer.weight_codes.detach().clone()
    round_to_bf16(model)
    assert layer.weight_codes.dtype == torch.float8_e4m3fn
    assert torch.equal(layer.weight_codes.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("recipe", ["bf16", *RECIPES.values()])
def test_eval_and_sensitivity_and_a_mix_compute_the_same(recipe):
    """A recipe in every block, by octavo eval's contestant, by sensitivity's study and by a mix read from a file."""
    model = language_model()
    names = {recipe: name for name, recipe in RECIPES.items()}
    made = high_precision(model, "bf16") if recipe == "bf16" else from_recipe(model, names[recipe])
    units = units_of(model.model)
    chosen = {unit.path: recipe for unit in units if recipe in unit.choices and not unit.is_table}
    with torch.no_grad(), in_bf16(model.model), mixed(model.model, units, chosen):
        studied = logits_of(model.model, TOKENS)
    Mix.of(units, chosen).apply(model.model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        applied = logits_of(model.model, TOKENS)
    assert torch.equal(made.logits(TOKENS), studied)
    assert torch.equal(applied, studied)

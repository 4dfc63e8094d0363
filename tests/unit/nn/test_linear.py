import pytest
import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.nn import functional as F

import octavo
from octavo.errors import ConfigError
from octavo.nn import Linear
from octavo.nn.fp8_weight import store_codes
from octavo.scaling import AmaxHistory, ScaleUpdates
from tests.contract.gemm_oracle import assert_product, recorded_products

RECIPES = tuple(name for name in octavo.recipes.names() if not octavo.recipes.get(name).has_static_input)


def test_constructor_matches_torch():
    torch.manual_seed(0)
    ours = Linear(12, 5, recipe="rowwise", dtype=torch.bfloat16, device="cpu")
    torch.manual_seed(0)
    theirs = torch.nn.Linear(12, 5, dtype=torch.bfloat16)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)
    assert isinstance(ours, torch.nn.Linear)
    assert Linear(12, 5, bias=False).bias is None
    assert Linear(12, 5).recipe.name == "tensorwise"
    assert repr(ours) == "Linear(in_features=12, out_features=5, bias=True, recipe=rowwise)"


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(2, 4, dtype=torch.int64),
        torch.zeros(2, 4, dtype=torch.bool),
        torch.zeros(2, 4).to(torch.float8_e4m3fn),
    ],
)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed"])
def test_inputs_that_are_no_numbers_are_refused(recipe, x):
    with pytest.raises(ConfigError, match=r"input of octavo.nn.Linear must be a float16, .* not torch\..*x\.float\(\)"):
        Linear(4, 3, recipe=recipe)(x)


@pytest.mark.parametrize("shape", [(2, 5), (5,), (), (4, 1)], ids=str)
def test_inputs_of_the_wrong_width_are_refused(shape):
    with pytest.raises(ConfigError, match=r"takes inputs \[\.\.\., 4\], not \("):
        Linear(4, 3)(torch.zeros(shape))


def test_an_unknown_recipe_is_refused():
    with pytest.raises(ConfigError, match="there is no recipe 'fp4'"):
        Linear(4, 3, recipe="fp4")


@pytest.mark.parametrize("recipe", RECIPES)
def test_torch_autocast_casts_the_input_and_keeps_the_weights_values(recipe):
    """Codes from bfloat16 inputs and float32 weights, sums in FP32, one rounding to bfloat16."""
    layer, x = Linear(64, 32, recipe=recipe), torch.randn(16, 64)
    with torch.autocast("cpu", torch.bfloat16), recorded_products() as products:
        y = layer(x)
    assert y.dtype is torch.bfloat16
    if recipe in ("bf16", "weight_only"):
        assert not products
        codes = octavo.quantize(layer.weight.detach(), octavo.E4M3, granularity=octavo.PerRow())
        weight = layer.weight if recipe == "bf16" else codes.dequantize()
        expected = F.linear(x.bfloat16().double(), weight.bfloat16().double(), layer.bias.double())
        torch.testing.assert_close(y.double(), expected, rtol=2**-7, atol=2**-7)
        return
    (product,) = products
    assert_product(y.detach(), product.a, product.b, layer.bias.detach())
    hp = octavo.quantize(x.bfloat16(), octavo.E4M3).data, octavo.quantize(layer.weight.detach(), octavo.E4M3).data
    if recipe in ("tensorwise", "delayed"):
        assert torch.equal(product.a.data.float(), hp[0].float())
        assert torch.equal(product.b.data.float(), hp[1].float())


@pytest.mark.parametrize("recipe", RECIPES)
def test_torch_autocast_gives_gradients_in_the_parameters_dtype(recipe):
    layer, x = Linear(64, 32, recipe=recipe), torch.randn(16, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert x.grad.dtype is layer.weight.grad.dtype is torch.float32


def _history(layer: Linear) -> AmaxHistory | None:
    return layer.amax_history


def test_set_recipe_makes_and_drops_the_history():
    layer = Linear(4, 3, recipe="tensorwise")
    assert _history(layer) is None
    layer.set_recipe(octavo.recipes.get("delayed"), ScaleUpdates(manual=True))
    history = _history(layer)
    assert history is not None
    assert history.updates.manual
    layer.set_recipe(octavo.recipes.get("delayed", margin=1))
    assert _history(layer) is history, "the same history specification"
    assert [history.updates.manual] == [False]
    layer.set_recipe(octavo.recipes.get("tensorwise"))
    assert _history(layer) is None
    assert not list(layer.buffers())
    layer.set_recipe(octavo.recipes.get("static"))
    assert [name for name, _ in layer.named_buffers()] == ["input_scale"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("recipe", RECIPES)
def test_without_gradients_the_output_is_the_same(recipe, mode):
    layer, x = Linear(16, 8, recipe=recipe).eval(), torch.randn(4, 16)
    expected = layer(x)
    with mode():
        y = layer(x)
    assert not y.requires_grad
    assert torch.equal(y, expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_frozen_weights_cost_no_product_for_their_gradient(recipe):
    layer, x = Linear(16, 8, recipe=recipe), torch.randn(4, 16, requires_grad=True)
    layer.weight.requires_grad_(False)
    with recorded_products() as products:
        layer(x).sum().backward()
    assert len(products) == (0 if recipe in ("bf16", "weight_only") else 2)
    assert layer.weight.grad is None
    assert x.grad is not None
    assert layer.bias.grad is not None


def test_float64_layers_train():
    layer = Linear(16, 8).double()
    layer(torch.randn(4, 16, dtype=torch.float64)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype is torch.float64


def test_finished_codes_are_held_untouched():
    weight = torch.randn(8, 16)
    codes = octavo.quantize(weight, octavo.E4M3, granularity=octavo.PerRow())
    layer = octavo.nn.Linear(16, 8, recipe="weight_only")
    layer.weight.requires_grad_(False)
    store_codes(layer, codes)
    assert layer.weight_codes.data_ptr() == codes.data.data_ptr()
    assert torch.equal(layer.state_dict()["weight_scale"], codes.scale)
    x = torch.randn(3, 16)
    torch.testing.assert_close(layer(x), x @ codes.dequantize().T + layer.bias)
    with pytest.raises(ConfigError, match=r"is \[16, 8\], and these codes are \[8, 16\]"):
        store_codes(octavo.nn.Linear(8, 16), codes)


@pytest.mark.long
def test_guards_of_a_compiled_layer_do_not_ask_for_fields_of_dataclasses():
    """Every call of a compiled layer checks its guards; torch 2.11 reads such fields by Python."""
    torch.compiler.reset()
    layer = Linear(32, 16, recipe="rowwise")  # whose backward casts the weight again
    torch.compile(layer, backend="aot_eager", fullgraph=True)(torch.randn(4, 32)).sum().backward()
    (entry,) = _debug_get_cache_entry_list(Linear.forward.__code__)
    guards = str(entry.guard_manager)
    assert "recipe" in guards
    assert "dataclass_fields" not in guards

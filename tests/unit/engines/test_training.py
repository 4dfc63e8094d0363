"""Training under a profile: the forward pass that serves, bit for bit, and the recipe's gradients."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import octavo
from octavo import recipes
from octavo.engines import PROFILES, convert_as_served, get, linear_as, model_as, quantize_as, served_recipe, weight_as
from octavo.engines.token_scores import log_probabilities
from octavo.errors import ConfigError
from octavo.kernels.dispatch import cast, cast_selections
from octavo.models import Llama
from octavo.nn.parameter_rounding import rounded_parameters
from octavo.numerics import CastSpec, EngineCast, Scaling
from octavo.onnx.layers import graph_linear
from octavo.parallel.weight_gather import high_precision_reason
from octavo.quantization import compensate_rounding
from octavo.recipes.engines import forward_recipe
from tests.oracle.engines.adversarial import finite_tensors, input_cast, nonfinite_tensors, same_codes
from tests.tiny_llama import tiny_llama_config

REFUSED = {
    "te-delayed": "fused_cast",
    "compressed-tensors": "products",
    "compressed-tensors-static": "products",
}
DYNAMIC = [name for name in PROFILES if name not in REFUSED and input_cast(name).scaling is Scaling.DYNAMIC]
PROVEN = ("vllm-token", "sglang-block", "torchao-rowwise")


def decoder(**sizes: int) -> Llama:
    shape = {"hidden_size": 128, "intermediate_size": 192, "num_layers": 2, **sizes}
    model = Llama(tiny_llama_config(**shape), seed=3).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5)
    return model


def input_spec(name: str) -> CastSpec:
    spec = served_recipe(get(name)).output.a
    assert spec is not None
    return spec


def tokens(count: int, length: int) -> torch.Tensor:
    return torch.randint(300, (count, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", DYNAMIC)
def test_logits_in_training_are_those_of_the_engine(name):
    model, ids = decoder(), tokens(2, 24)
    served = model_as(model, get(name))(ids)
    with convert_as_served(model, get(name)):
        assert torch.equal(model.train()(ids), served)
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())


def test_skipped_layers_train_in_high_precision():
    model, ids = decoder(), tokens(2, 24)
    profile = replace(get("vllm-token"), skipped=("*.down_proj",))
    served = model_as(model, profile)(ids)
    assert not torch.equal(served, model_as(model, get("vllm-token"))(ids))
    with convert_as_served(model, profile):
        assert torch.equal(model(ids), served)


@pytest.mark.long
@pytest.mark.parametrize("name", PROVEN)
def test_log_probabilities_of_10_000_tokens_after_updates(name):
    model = decoder(hidden_size=32, intermediate_size=64)
    context = convert_as_served(model, get(name), gradients="rowwise")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in tokens(6, 64).split(2):
        with context:
            loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    plain, ids, seen = copy.deepcopy(model), tokens(157, 64), 0
    octavo.restore(plain)
    engine = model_as(plain, get(name))
    for part in ids.split(16):
        with context:
            ours = log_probabilities(model(part).detach())
        assert torch.equal(ours, log_probabilities(engine(part)))
        seen += part.numel()
    assert seen > 10_000


@pytest.mark.parametrize("name", [name for name in PROFILES if name != "te-delayed"])
def test_a_recipes_casts_are_the_engines(name):
    recipe = forward_recipe(get(name))
    for engine, spec in ((get(name).weight, recipe.output.b), (input_cast(name), recipe.output.a)):
        assert spec is not None
        for tensor_name, x in (finite_tensors(torch.bfloat16) | nonfinite_tensors(torch.bfloat16)).items():
            measured = replace(engine, scaling=Scaling.DYNAMIC)
            expected, ours = quantize_as(x, measured), cast(x, spec).output
            assert torch.equal(ours.scale, expected.scale) or expected.scale.isnan().any(), tensor_name
            assert same_codes(ours.data, expected.data), tensor_name
            wide = cast(x.float(), spec).output  # an optimizer's weight with the same values
            assert torch.equal(wide.data.view(torch.uint8), ours.data.view(torch.uint8)), tensor_name
    assert recipes.from_toml(recipes.to_toml(recipe)) == recipe


@pytest.mark.parametrize("name", ["vllm-block-ue8m0", "sglang-block-ue8m0"])
def test_an_engine_that_casts_a_files_weights_again_decodes_the_same(name):
    """So a folder of octavo export --for such an engine serves the weights that were trained."""
    codes = weight_as(torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).bfloat16(), get(name))
    again = weight_as(codes, get(name))
    assert again is not codes
    assert torch.equal(again.dequantize(), codes.dequantize().float())


def test_no_fast_kernel_casts_as_an_engine_does(monkeypatch):
    monkeypatch.setattr("octavo.kernels.dispatch._cast_choices", {})  # the first 1024 of a process are kept
    cast(torch.ones(3, 7), input_spec("vllm-token"))
    selection = next(each for each in cast_selections() if each.problem.shape == (3, 7) and each.problem.foreign)
    assert selection.backend == "reference"
    assert "it makes octavo's scales, not another engine's" in dict(selection.rejected).values()


def test_gradients_in_high_precision_pass_straight_through():
    generator = torch.Generator().manual_seed(0)
    layer = octavo.nn.Linear(64, 32, recipe=served_recipe(get("vllm-token")))
    x = torch.randn(16, 64, generator=generator).bfloat16().requires_grad_()
    g = torch.randn(16, 32, generator=generator).bfloat16()
    weight = layer.weight.detach().bfloat16()
    with rounded_parameters(layer, torch.bfloat16):
        y = layer(x)
    y.backward(g)
    assert torch.equal(y, linear_as(x, weight, get("vllm-token"), bias=layer.bias.bfloat16()))
    exact_x, exact_w = g.double() @ weight.double(), g.double().t() @ x.detach().double()
    assert x.grad is not None
    assert layer.weight.grad is not None
    torch.testing.assert_close(x.grad.double(), exact_x, rtol=2**-8, atol=1e-5)  # one rounding to BF16
    torch.testing.assert_close(layer.weight.grad.double(), exact_w, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("gradients", ["rowwise", "tensorwise"])
def test_gradients_in_fp8_are_the_recipes(gradients):
    """The recipe alone gives the same gradients of a layer, whose backward pass does not read the forward's codes."""
    recipe = replace(recipes.get(gradients), emulate_tensor_cores=True)
    grads = []
    for each in (served_recipe(get("vllm-token"), gradients), recipe):
        layer = octavo.nn.Linear(64, 32, bias=False, recipe=each)
        nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(2)).requires_grad_()
        layer(x).backward(torch.randn(16, 32, generator=torch.Generator().manual_seed(3)))
        grads.append((x.grad, layer.weight.grad))
    for ours, theirs in zip(*grads, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("name", "what"), REFUSED.items())
def test_what_training_cannot_reproduce_is_named(name, what):
    with pytest.raises(ConfigError, match=f"as {name}: its {what} is"):
        served_recipe(get(name))


def test_other_outputs_and_scales_of_past_steps_and_of_calibration_are_named_too():
    profile = replace(get("vllm-token"), kv_cache=EngineCast(scaling=Scaling.DELAYED))
    with pytest.raises(ConfigError, match=r"its kv_cache\.scaling is delayed"):
        served_recipe(profile)
    with pytest.raises(ConfigError, match=r"its output is torch\.float32, and layers here return .*torch\.bfloat16"):
        served_recipe(replace(get("vllm-token"), output=torch.float32))
    with pytest.raises(ConfigError, match="scales from calibration"):
        convert_as_served(decoder(), get("vllm-tensor"))


def test_whatever_computes_octavos_scales_itself_refuses_an_engines():
    layer = octavo.nn.Linear(32, 16, recipe=served_recipe(get("vllm-token")))
    with pytest.raises(ConfigError, match="leave compensated rounding out"):
        compensate_rounding(nn.Sequential(layer), [torch.randn(8, 32)])
    assert "casts it as another engine does" in str(high_precision_reason(layer, layer.recipe))
    with pytest.raises(ConfigError, match="an ONNX graph casts as octavo does"):
        graph_linear(layer, torch.float32, "0")


def test_a_casts_engine_fits_it():
    spec = input_spec("vllm-token")
    assert spec.engine is not None
    with pytest.raises(ConfigError, match="have one granularity"):
        replace(spec, granularity=octavo.PerTensor())
    foreign = replace(spec, engine=replace(spec.engine, amax_floor=0.5))
    with pytest.raises(ConfigError, match="casts of named engines"):
        recipes.to_toml(replace(recipes.get("weight_only"), output=recipes.GemmSpec(a=foreign, b=foreign)))
    with pytest.raises(ConfigError, match="a profile and its role"):
        recipes.from_toml(recipes.to_toml(served_recipe(get("vllm-token"))).replace("vllm-token.input", "vllm.input"))


def test_an_engine_may_be_its_name():
    model = decoder()
    assert served_recipe("vllm-block", "blockwise") == served_recipe(get("vllm-block"), "blockwise")
    plain = copy.deepcopy(model)
    ids = tokens(1, 8)
    with convert_as_served(plain, "vllm-token"):
        assert torch.equal(plain(ids), model_as(model, "vllm-token")(ids))
    for call in (lambda: served_recipe("vllm"), lambda: convert_as_served(plain, "vllm")):
        with pytest.raises(ConfigError, match="there is no engine 'vllm'"):
            call()

import numpy as np
import pytest
import torch

import octavo
from octavo import recipes
from octavo.errors import ConfigError
from octavo.export.lockstep import relative_error
from octavo.formats import E4M3
from octavo.nn import Linear
from octavo.nn.fp8_weight import store_weight_as_codes
from octavo.onnx.layers import graph_linear, narrowed_scale, unit_scale
from tests.recorded_state import end_step

K, N = 48, 20


def layer(recipe: str, *, seed: int = 0, bias: bool = True, **options: str) -> Linear:
    torch.manual_seed(seed)
    made = Linear(K, N, bias, recipe=recipes.get(recipe, **options))
    if made.recipe.has_static_input:
        made.input_scale.copy_(torch.tensor(0.0123))
    return made.eval()


RECIPES = {
    "tensorwise": ("dynamic", "per tensor"),
    "rowwise": ("dynamic per row", "per channel"),
    "static": ("static", "per tensor"),
    "weight_only": ("high precision", "per channel"),
    "delayed": ("dynamic", "per tensor"),  # without a past
}


@pytest.mark.parametrize("recipe", RECIPES)
@torch.no_grad()
def test_graph_layer_matches_the_layer(recipe):
    source, x = layer(recipe), torch.randn(3, 5, K)
    made, note = graph_linear(source, torch.float32, "a.b")
    assert relative_error(made(x), source(x)) < 1e-6
    assert (note.input, note.weight) == RECIPES[recipe]
    assert note.is_fp8 == (recipe != "weight_only")
    assert ("casts no input" in note.reason) == (recipe == "weight_only")


@torch.no_grad()
def test_delayed_layer_uses_the_scale_of_its_history():
    source = layer("delayed").train()
    with torch.enable_grad():
        source(torch.randn(4, K)).sum().backward()
    end_step()
    source.eval()
    x = 3 * torch.randn(4, K)  # beyond what was seen: saturates
    made, note = graph_linear(source, torch.float32, "a")
    assert note.input == "static"
    assert relative_error(made(x), source(x)) < 1e-6


def test_stored_codes_are_unchanged():
    source = layer("static", weight_granularity="row").requires_grad_(False)
    store_weight_as_codes(source, scale=torch.rand(N, 1) + 0.01)
    made, _ = graph_linear(source, torch.float32, "a")
    assert torch.equal(made.codes.t().view(torch.uint8), source.weight_codes.view(torch.uint8))
    assert torch.equal(made.scale, source.weight_scale.flatten())
    assert made.codes.is_contiguous()
    assert made.codes.shape == (K, N)


def test_an_all_zero_channel_has_scale_1():
    source = layer("rowwise")
    with torch.no_grad():
        source.weight[3] = 0
    made, _ = graph_linear(source, torch.float16, "a")
    assert made.scale[3] == 1
    assert (made.codes[:, 3].float() == 0).all()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@torch.no_grad()
def test_zero_input_gives_the_bias(recipe):
    source = layer(recipe)
    made, _ = graph_linear(source, torch.float32, "a")
    assert torch.equal(made(torch.zeros(2, K)), source.bias.expand(2, N))


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_blockwise_recipes_are_refused(recipe):
    with pytest.raises(ConfigError, match=r"layer 'a\.b' has a weight in E4M3, PerBlock"):
        graph_linear(layer(recipe), torch.float32, "a.b")


def test_static_layer_without_a_scale_is_refused():
    source = layer("static")
    source.input_scale.zero_()
    with pytest.raises(ConfigError, match="'a' has no scale for its static input"):
        graph_linear(source, torch.float32, "a")


def test_scales_outside_the_dtypes_range_are_refused():
    small = torch.tensor([0.5, 1e-7])
    assert torch.equal(narrowed_scale(small, torch.float32, "x"), small)
    assert narrowed_scale(small, torch.bfloat16, "x").dtype is torch.bfloat16
    with pytest.raises(ConfigError, match=r"the scale 1e-07 of x is outside the range of float16"):
        narrowed_scale(small, torch.float16, "x")
    with pytest.raises(ConfigError, match="outside the range of float16"):
        narrowed_scale(torch.tensor(1e-9), torch.float16, "x")


def test_unit_scale_maps_the_maximum_below_1():
    assert 0.5 <= E4M3.max * unit_scale().item() < 1


def test_sixteen_bits_do_not_overflow():
    source = octavo.nn.Linear(4096, 8, recipe="tensorwise")
    with torch.no_grad():
        source.weight.fill_(1.0)
        made, _ = graph_linear(source, torch.float16, "a")
        y = made(torch.full((1, 4096), 15.0, dtype=torch.float16))
    assert made.bias is not None
    assert torch.equal(y, torch.full((1, 8), 61440.0, dtype=torch.float16) + made.bias)


def test_every_float16_scale():
    """Each value, each tie between two and FP32's neighbours of both, against exact arithmetic in float64."""
    values = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)  # positive, ascending
    ties = (values[:-1].astype(np.float64) + values[1:]) / 2
    points = np.concatenate([values, ties.astype(np.float32)])
    assert np.array_equal(ties, ties.astype(np.float32))  # FP32 has them all
    scales = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))])
    held = scales.astype(np.float16)
    exact = np.abs(held.astype(np.float64) - scales) / scales
    normal = (scales >= 2.0**-14) & (scales <= 65504)
    assert exact[normal].max() <= 2.0**-11  # where it has all its digits
    taken = exact <= 2.0**-8
    assert np.array_equal(narrowed_scale(torch.tensor(scales[taken]), torch.float16, "x").numpy(), held[taken])
    assert exact[taken].max() > 2.0**-9  # below them: more than float16 is known for
    assert taken[scales >= 2.0**-17].all()
    for wrong in scales[~taken]:
        with pytest.raises(ConfigError, match="outside the range of float16"):
            narrowed_scale(torch.tensor(wrong), torch.float16, "x")


@pytest.mark.parametrize("scale", [float("inf"), float("nan"), 0.0, 65520.0])
def test_invalid_scales_are_refused(scale):
    with pytest.raises(ConfigError, match="outside the range of float16"):
        narrowed_scale(torch.tensor(scale), torch.float16, "x")

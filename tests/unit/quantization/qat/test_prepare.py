"""``prepare_qat``, training, ``convert_qat``: what a prepared model computes, learns and leaves."""

import copy
import math
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import recipes
from octavo.errors import ConfigError
from octavo.models import Llama
from octavo.nn.fp8_weight import is_own_linear
from octavo.numerics import scale_from_amax
from octavo.quantization import convert_qat, freeze_scales, parameter_groups, prepare_qat
from octavo.quantization.qat.linear import QATLinear
from octavo.recipes import CastSpec
from tests.tiny_llama import tiny_llama_config

RECIPES = ("static", "tensorwise", "rowwise", "rowwise_hp_grad_weight", "blockwise", "mxfp8", "weight_only")
LLAMA = tiny_llama_config(vocab_size=64, intermediate_size=48, max_positions=16)


def small(seed: int = 0) -> nn.Sequential:
    """Ragged shapes, a bias here and none there."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(70, 33), nn.GELU(), nn.Linear(33, 129, bias=False), nn.Tanh(), nn.Linear(129, 5))


def train(model: nn.Module, *, steps: int = 3, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(parameter_groups(model.train(), learning_rate=1e-2, weight_decay=0.1))
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 70, generator=generator)).square().mean().backward()
        optimizer.step()
    model.eval()


def layer_of(model: nn.Module, path: str) -> QATLinear:
    layer = model.get_submodule(path)
    assert isinstance(layer, QATLinear)
    return layer


@pytest.mark.parametrize("hold", [False, True], ids=["weights", "codes"])
@pytest.mark.parametrize("scales", ["tracked", "learned"])
@pytest.mark.parametrize("name", RECIPES)
def test_the_converted_model_computes_what_the_prepared_one_did(name, scales, hold):
    """To the bit, in FP32 and under autocast, [B, T, K] and [M, K]; and it is what octavo.convert makes."""
    model = small()
    prepare_qat(model, name, scales=scales)
    train(model)
    plain = small()
    learned = {key: value for key, value in model.state_dict().items() if not key.endswith("log2_scale")}
    plain.load_state_dict(learned)
    inputs = [torch.randn(4, 7, 70) * 2, torch.randn(9, 70), torch.randn(0, 70)]

    def outputs(which: nn.Module) -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            narrow = [which(x) for x in inputs]
        return [*narrow, *(which(x) for x in inputs)]

    before = outputs(model)
    report = convert_qat(model, hold_weights=hold)
    octavo.convert(plain, name)
    octavo.load_scaling_state(plain, octavo.scaling_state(model))
    assert report.converted == ("0", "2", "4")
    assert report.stored == (report.converted if hold else ())
    assert all(is_own_linear(model[index]) for index in (0, 2, 4))
    for mine, converted, theirs in zip(before, outputs(model), outputs(plain), strict=True):
        assert torch.equal(mine, converted)
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", RECIPES)
def test_the_training_forward_is_the_converted_models_too(name):
    """Not in evaluation alone: a step's loss is that of the model that would be converted after it."""
    model = small()
    prepare_qat(model, name)
    x = torch.randn(6, 70)
    y = model.train()(x)
    convert_qat(model)
    assert torch.equal(y, model(x))


def test_a_decoder_keeps_its_head_and_its_names():
    model = Llama(LLAMA, seed=1)
    keys = list(model.state_dict())
    report = prepare_qat(model, "static", skip=["*.down_proj"], overrides={"model.layers.0.*": "rowwise"})
    assert len(report.converted) == 12
    assert {path for path in report.skipped if "proj" not in path} == {"model.embed_tokens", "lm_head"}
    model(torch.arange(20).view(2, 10)).sum().backward()
    assert list(model.state_dict()) == keys
    assert len(octavo.scaling_state(model)) == 6
    after = convert_qat(model)
    assert after.converted == report.converted
    assert after.skipped["lm_head"] == "not prepared"
    for path in ("lm_head", "model.layers.1.mlp.down_proj"):
        assert type(model.get_submodule(path)) is nn.Linear


def test_modules_of_octavos_own_take_part():
    """A fused layer's linear is asked for by its class; prepared, it runs unfused and is trained for."""
    fused = octavo.nn.LayerNormLinear(16, 8)
    prepare_qat(fused, "static", min_weight_elements=1)
    x = torch.randn(4, 16)
    y = fused(x)
    y.sum().backward()
    assert convert_qat(fused).converted
    assert torch.equal(fused(x), y)


def spec(name: str = "static") -> CastSpec:
    found = recipes.get(name).output.a
    assert found is not None
    return found


def test_the_projections_of_torchs_attention_take_part():
    torch.manual_seed(0)
    layer: Any = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    keys, parameters = layer.state_dict().keys(), set(layer.parameters())
    report = prepare_qat(layer, "static")
    assert report.converted == ("self_attn.out_proj", "self_attn.in_proj", "linear1", "linear2")
    assert not report.parameters
    assert not report.notes
    x = torch.randn(2, 5, 16) * 3
    layer(x).square().sum().backward()
    assert layer.self_attn.in_proj.input_scale == scale_from_amax(x.abs().max(), octavo.E4M3)
    assert all(parameter.grad is not None for parameter in layer.parameters())
    with torch.no_grad():
        trained = layer.eval()(x)
        convert_qat(layer)
        assert torch.equal(layer(x), trained)
    assert layer.state_dict().keys() == keys
    assert set(layer.parameters()) == parameters


def test_an_encoder_whose_layers_are_refused_keeps_its_attention():
    layer = nn.TransformerEncoderLayer(16, 4, 32)
    with pytest.raises(ConfigError, match="matches no layer"):
        prepare_qat(layer, "static", skip=["nowhere"])
    assert type(layer.self_attn) is nn.MultiheadAttention


def test_tracked_scales_are_a_maximum_that_fades():
    model, decay = nn.Sequential(nn.Linear(4, 2)), 0.5
    prepare_qat(model, "static", decay=decay)
    seen = 0.0
    for amax in (0.0, 3.0, 8.0, 1.0, 1.0, 1.0, 0.0):
        model(torch.tensor([[amax, -amax / 2, 0.0, 0.0]]))
        seen = max(amax, seen * decay)
        wanted = scale_from_amax(torch.tensor(seen), spec().format).item() if seen else 1.0
        assert octavo.scaling_state(model)["0.input.scale"].item() == wanted
    with torch.no_grad():
        model(torch.full((1, 4), 1000.0))  # training mode, though without gradients: calibration
    assert octavo.scaling_state(model)["0.input.scale"].item() == scale_from_amax(torch.tensor(1000.0), spec().format)


def test_evaluation_and_frozen_scales_write_nothing():
    model = nn.Sequential(nn.Linear(4, 2))
    prepare_qat(model, "static")
    model(torch.ones(1, 4))
    before = octavo.scaling_state(model)
    model.eval()(torch.full((1, 4), 50.0))
    assert octavo.scaling_state(model) == before
    freeze_scales(model.train())
    model(torch.full((1, 4), 50.0))
    assert octavo.scaling_state(model) == before


def test_a_batch_with_nan_tracks_its_finite_elements():
    model = nn.Sequential(nn.Linear(3, 2))
    prepare_qat(model, "static")
    model(torch.tensor([[torch.nan, 2.0, torch.inf]]))
    assert octavo.scaling_state(model)["0.input.scale"].item() == scale_from_amax(torch.tensor(2.0), spec().format)
    assert octavo.nonfinite_counts(model) == {"0.input": 2}


@pytest.mark.parametrize("scales", ["tracked", "learned"])
def test_checkpointing_changes_nothing(scales):
    """The second run of a forward, inside backward, must find the scale of the first and count nothing again."""
    results = []
    for checkpointed in (False, True):
        model = small()
        prepare_qat(model, "static", scales=scales, decay=0.5, clip_gradients=True)
        for factor in (1.0, 10.0, 0.1):
            x = torch.randn(4, 70, generator=torch.Generator().manual_seed(3)) * factor
            model.zero_grad()
            (checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)).square().sum().backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        results.append((gradients, octavo.scaling_state(model)))
    (plain, plain_state), (again, again_state) = results
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert plain_state == again_state


def test_checkpointing_counts_nan_once():
    model = nn.Sequential(nn.Linear(4, 4))
    prepare_qat(model, "tensorwise")
    x = torch.tensor([[torch.nan, 1.0, 1.0, 1.0]])
    checkpoint(model, x, use_reentrant=False).sum().backward()
    assert octavo.nonfinite_counts(model) == {"0.input": 1}


def test_learned_scales_begin_at_the_first_amax_and_are_learned():
    model = nn.Sequential(nn.Linear(4, 2))
    prepare_qat(model, "static", scales="learned")
    layer = layer_of(model, "0")
    model(torch.zeros(1, 4))
    assert octavo.scaling_state(model)["0.input.scale"].item() == 1  # nothing to begin with yet
    x = torch.tensor([[3.0, 1.01, 0.7, 0.33]])
    model(x)
    began = octavo.scaling_state(model)["0.input.scale"].item()
    assert began == pytest.approx(3 / 448, rel=1e-6)
    optimizer = torch.optim.SGD(parameter_groups(model, learning_rate=0.0 + 1e-9, weight_decay=0.0))
    model(x).sum().backward()
    optimizer.step()
    model(100 * x)  # and no amax moves it any more
    assert layer.log2_scale is not None
    assert layer.input_scale.item() == layer.log2_scale.exp2().item() != began
    assert layer.input_scale.item() == pytest.approx(began, rel=0.01)


def test_the_last_optimizer_step_counts():
    """The scale that is converted is the parameter's, not that of the last forward before its step."""
    model = nn.Sequential(nn.Linear(4, 2))
    prepare_qat(model, "static", scales="learned")
    model(torch.ones(1, 4))
    layer = layer_of(model, "0")
    assert layer.log2_scale is not None
    with torch.no_grad():
        layer.log2_scale.fill_(-3.0)
    convert_qat(model)
    assert octavo.scaling_state(model)["0.input.scale"].item() == 0.125


@pytest.mark.parametrize("scales", ["tracked", "learned", "frozen"])
def test_a_calibrated_model_begins_with_its_scales(scales):
    model = nn.Sequential(nn.Linear(4, 2))
    octavo.convert(model, "static")
    octavo.load_scaling_state(model, {"0.input.scale": torch.tensor(0.25)})
    prepare_qat(model, "static", scales=scales, decay=1.0)
    model(torch.ones(1, 4))
    assert octavo.scaling_state(model)["0.input.scale"].item() == pytest.approx(0.25, rel=1e-6)


def test_loaded_scales_are_begun_with_too():
    for scales in ("tracked", "learned", "frozen"):
        model = nn.Sequential(nn.Linear(4, 2))
        prepare_qat(model, "static", scales=scales, decay=1.0)
        octavo.load_scaling_state(model, {"0.input.scale": torch.tensor(0.25)})
        model(torch.ones(1, 4))
        assert octavo.scaling_state(model)["0.input.scale"].item() == pytest.approx(0.25, rel=1e-6)


def test_learned_scales_are_what_the_recipe_allows():
    """Powers of two where it says so, rounded up; and numbers whose reciprocal FP32 has, wherever training goes."""
    model = nn.Sequential(nn.Linear(8, 8))
    prepare_qat(model, recipes.get("static", power_of_two=True), scales="learned")
    layer, x = cast("QATLinear", model[0]), torch.randn(4, 8)
    assert layer.log2_scale is not None
    model(x)
    for value, scale in ((-6.009, 2.0**-6), (-5.0, 2.0**-5), (-4.2, 2.0**-4)):
        with torch.no_grad():
            layer.log2_scale.fill_(value)
        model(x)
        assert float(layer.input_scale) == scale
    for value in (200.0, -200.0):
        with torch.no_grad():
            layer.log2_scale.fill_(value)
        assert model(x).isfinite().all()
    convert_qat(model)
    assert math.log2(octavo.scaling_state(model)["0.input.scale"]).is_integer()


@pytest.mark.parametrize("exponent", range(-40, 113, 8))
def test_a_learned_power_of_two_is_as_far_from_the_next_one_down_as_up(exponent):
    """A small step of the optimizer changes no scale, whichever way it goes."""
    x = torch.full((1, 8), 448 * 2.0**exponent)
    for step in (-0.49, 0.0, 0.49):
        model = nn.Sequential(nn.Linear(8, 8))
        prepare_qat(model, recipes.get("static", power_of_two=True), scales="learned")
        layer = cast("QATLinear", model[0])
        model(x)
        assert layer.log2_scale is not None
        with torch.no_grad():
            layer.log2_scale.add_(step)
        model(x)
        assert float(layer.input_scale) == 2.0**exponent


def test_learned_scales_resume_from_the_state_dict():
    first, second = small(), small(seed=5)
    for model in (first, second):
        prepare_qat(model, "static", scales="learned")
    train(first)
    second.load_state_dict(first.state_dict())
    x = torch.randn(5, 70)
    assert torch.equal(second.eval()(x), first(x))


def test_frozen_scales_without_calibration_are_refused():
    model = nn.Sequential(nn.Linear(4, 2))
    prepare_qat(model, "static", scales="frozen")
    with pytest.raises(ConfigError, match="layer '0' has no scale"):
        model(torch.ones(1, 4))


def test_a_layer_that_was_never_reached_is_plain_again_and_named():
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.zero = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.used(x) + self.zero(torch.zeros_like(x))

    model = Branch()
    prepare_qat(model, "static")
    model(torch.ones(2, 4))
    report = convert_qat(model)
    assert report.converted == ("used", "zero")
    assert "no training forward has reached it" in report.skipped["unused"]
    assert type(model.unused) is nn.Linear
    assert octavo.scaling_state(model)["zero.input.scale"].item() == 1


def test_a_model_of_which_nothing_was_reached_is_plain_again():
    model = small()
    prepare_qat(model, "static")
    assert convert_qat(model).converted == ()
    assert type(model[0]) is nn.Linear


def test_a_step_of_the_optimizer_decays_no_scale():
    model = small()
    prepare_qat(model, "static", scales="learned")
    x = torch.zeros(1, 70)  # no gradient for any scale
    x[0, 0] = 448.0
    model(x)
    groups = parameter_groups(model, learning_rate=0.1, weight_decay=0.5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.AdamW(groups).step()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) == (tensor.ndim < 2), name
    members = [parameter for group in groups for parameter in group["params"]]
    assert {id(parameter) for parameter in members} == {id(parameter) for parameter in model.parameters()}
    assert len(members) == len(list(model.parameters()))


def test_high_precision_inside_autocast_and_in_overrides():
    model = small()
    wanted = copy.deepcopy(model)
    prepare_qat(model, "static", overrides={"2": "bf16"})
    x = torch.randn(3, 70)
    with octavo.autocast(enabled=False):
        assert torch.equal(model(x), wanted(x))
    assert octavo.scaling_state(model)["0.input.scale"].item() == 0  # nothing was tracked there
    assert not isinstance(model[2], QATLinear)


def test_dtype_and_device_moves_keep_the_state():
    model = small()
    prepare_qat(model, "static", scales="learned")
    model(torch.randn(3, 70))
    model.bfloat16()
    layer = layer_of(model, "0")
    assert layer.seen_amax.dtype is torch.float32
    assert model(torch.randn(3, 70, dtype=torch.bfloat16)).dtype is torch.bfloat16
    model(torch.randn(3, 70, dtype=torch.bfloat16)).sum().backward()
    assert layer.log2_scale is not None
    assert layer.log2_scale.grad is not None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"recipe": "delayed"}, "takes its scales from training steps"),
        ({"overrides": {"0": "delayed"}}, "takes its scales from training steps"),
        ({"recipe": "bf16"}, "casts no weight"),
        ({"scales": "guessed"}, "tracked, learned, frozen, not 'guessed'"),
        ({"decay": 0.0}, "decay must be above 0"),
        ({"decay": 1.5}, "at most 1"),
        ({"decay": math.nan}, "decay"),
        ({"skip": "0"}, "list of patterns"),
        ({"overrides": ["0"]}, "mapping"),
        ({"recipe": "int8"}, "there is no recipe"),
    ],
)
def test_refused_preparation_leaves_the_model_unchanged(arguments: dict[str, Any], words):
    model = small()
    with pytest.raises(ConfigError, match=words):
        prepare_qat(model, **arguments)
    assert all(type(module) is not QATLinear and type(module) is not octavo.nn.Linear for module in model)


def test_prepared_twice_or_not_at_all():
    model = small()
    with pytest.raises(ConfigError, match=r"call octavo\.prepare_qat first"):
        convert_qat(model)
    prepare_qat(model)
    with pytest.raises(ConfigError, match="layer '0' is already in quantization-aware training"):
        prepare_qat(model)
    with pytest.raises(ConfigError, match="delayed"), octavo.autocast(recipe="delayed"):
        model(torch.ones(1, 70))


def test_convert_leaves_prepared_layers_alone():
    model = small()
    prepare_qat(model, "static")
    with pytest.warns(UserWarning, match="convert changed nothing: .* subclass QATLinear of nn.Linear"):
        assert octavo.convert(model, "tensorwise", convert_head=True).converted == ()
    assert octavo.restore(model) == ()
    assert isinstance(model[0], QATLinear)


def regression(prepare: bool) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Sixteen weights that are all wanted at 1.06, between FP8's 1 and 1.125, and inputs that are nearly alike."""
    generator = torch.Generator().manual_seed(0)
    x = 1 + 0.05 * torch.randn(256, 16, generator=generator)
    model = nn.Sequential(nn.Linear(16, 1, bias=False))
    weight = model.get_parameter("0.weight")
    with torch.no_grad():
        weight.copy_(1.06 + 0.02 * torch.randn(1, 16, generator=generator))
        weight[0, 0] = 1.75  # the amax, a code exactly: scale 1.75 / 448 = 2^-8
    if prepare:
        prepare_qat(model, "static")
    target = x @ torch.full((16, 1), 1.06)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(200):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
    return model, x, target


def test_training_for_fp8_beats_quantizing_what_was_trained_without():
    """Each weight alone would round the same way and the errors add up; together they can be rounded to cancel."""

    def loss(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> float:
        with torch.no_grad():
            return (model.eval()(x) - target).square().mean().item()

    tuned, x, target = regression(prepare=False)
    exact = loss(tuned, x, target)
    prepare_qat(tuned, "static", decay=1.0)
    tuned.train()(x)
    convert_qat(tuned)
    trained, x, target = regression(prepare=True)
    convert_qat(trained)
    quantized, trained_for = loss(tuned, x, target), loss(trained, x, target)
    assert exact < 0.1 * quantized
    assert trained_for < 0.25 * quantized


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "scales"),
    [
        ("static", "tracked"),
        ("static", "frozen"),
        ("tensorwise", "tracked"),
        ("rowwise", "tracked"),
        ("weight_only", "tracked"),
    ],
)
def test_compiled_it_trains_as_it_does_eagerly(name, scales):
    """To the bit, in one graph: weights, scales and outputs after three steps."""
    twins = []
    for _ in range(2):
        model = small()
        prepare_qat(model, name, scales=scales)
        if name == "static" and scales == "frozen":
            octavo.load_scaling_state(model, {key: torch.tensor(0.01) for key in octavo.scaling_state(model)})
        twins.append(model)
    eager, traced = twins
    torch.compiler.reset()
    compiled = torch.compile(traced, fullgraph=True, backend="aot_eager")
    train(eager)
    train(cast("nn.Module", compiled))
    x = torch.randn(4, 70)
    assert torch.equal(eager(x), compiled(x))
    for (key, value), same in zip(eager.state_dict().items(), traced.state_dict().values(), strict=True):
        assert torch.equal(value, same), key
    state, same_state = octavo.scaling_state(eager), octavo.scaling_state(traced)
    assert all(torch.equal(value, same_state[key]) for key, value in state.items())
    convert_qat(traced)
    assert torch.equal(traced(x), eager(x))

"""What weights and inputs become, beside the model itself with the same rounding done by hand."""

import copy

import pytest
import torch
import torch.nn.functional as F

import octavo
from octavo.errors import BackendError, ConfigError
from octavo.formats import E4M3, FP32
from octavo.inference import ModelRunner, ServingRecipe
from octavo.inference.decoder_weights import DecoderWeight, InputCast
from octavo.inference.recipes import decoder_weight
from octavo.kernels import native_bindings
from octavo.models import Llama
from octavo.numerics import saturation_fraction
from octavo.numerics.integers import Int8Rows, quantize_int8
from tests.tiny_llama import tiny_llama_config

LEVELS = ("torch", *native_bindings.levels())
TOKENS = torch.arange(90) * 7 % 300
ROWS = octavo.PerRow()


def model(**options):
    """Biases everywhere but the head, and none of them zero."""
    config = tiny_llama_config(
        hidden_size=72,
        intermediate_size=200,
        num_heads=6,
        max_positions=96,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        **options,
    )
    made, generator = Llama(config, seed=1), torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(3.0).add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return made.requires_grad_(False).eval()


def read(runner):
    cache = runner.new_cache(fmt=FP32)
    return torch.cat([runner(part, cache, every=True) for part in TOKENS.split([70, 1, 19])])


def rounded_rows(x):
    return octavo.quantize(x, E4M3, granularity=ROWS).dequantize()


BY_HAND = {
    "bf16": (lambda w: w.bfloat16().float(), lambda x: x),
    "int8": (lambda w: quantize_int8(w).dequantize(), lambda x: quantize_int8(x).dequantize()),
    "fp8": (rounded_rows, lambda x: x),
    "fp8-dynamic": (rounded_rows, rounded_rows),
}


def by_hand(made, recipe):
    """The model's own forward, weights replaced and inputs cast before each linear."""
    made, (weight, cast) = copy.deepcopy(made), BY_HAND[recipe]
    for name, layer in made.named_modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.copy_(weight(layer.weight))
            if name != "lm_head" or recipe == "int8":
                layer.register_forward_pre_hook(lambda _, inputs: (cast(inputs[0]),))
    return made(TOKENS[None])[0]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("recipe", BY_HAND)
def test_logits_match_model_with_the_same_rounding(level, tie, recipe):
    made = model(tie_embeddings=tie)
    found, wanted = read(ModelRunner(made, recipe=recipe, level=level)), by_hand(made, recipe)
    if BY_HAND[recipe][1](torch.tensor([1.03]))[0] == torch.tensor(1.03):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    else:  # another order of sums moves an element across a code's border now and then
        assert octavo.numerics.sqnr_db(wanted, found) > 30


@pytest.mark.parametrize("level", LEVELS)
def test_static_scales_match_calibration_and_saturation_is_counted(level):
    """Of a model calibrated on a few tokens, so that others are clipped; the head has no scale."""
    made = model()
    octavo.calibrate(made, [TOKENS[None, :3]]).apply(made, hold_weights=True)
    runner, clipped, seen = ModelRunner(made, recipe="fp8-static", level=level), 0.0, 0
    found = read(runner)

    def count(layer, inputs):
        nonlocal clipped, seen
        codes = octavo.quantize(inputs[0], E4M3, scale=layer.input_scale)
        clipped += saturation_fraction(inputs[0], codes) * inputs[0].numel()
        seen += inputs[0].numel()

    for name, layer in made.named_modules():
        if name.endswith(("q_proj", "o_proj", "gate_proj", "down_proj")):
            layer.register_forward_pre_hook(count)
    made.lm_head.weight = torch.nn.Parameter(rounded_rows(made.lm_head.weight), requires_grad=False)
    wanted = made(TOKENS[None])[0]
    assert octavo.numerics.sqnr_db(wanted, found) > 30
    assert runner.saturation.elements == seen
    assert clipped > 20
    assert abs(runner.saturation.saturated - clipped) <= max(2, 0.05 * clipped)


@pytest.mark.parametrize("level", native_bindings.levels())
@pytest.mark.parametrize("recipe", ServingRecipe)
def test_native_kernels_match_reference(level, recipe):
    made = model()
    if recipe == "fp8-static":
        octavo.calibrate(made, [TOKENS[None]]).apply(made, hold_weights=True)
    wanted, found = (read(ModelRunner(made, recipe=recipe, level=name)) for name in ("torch", level))
    assert octavo.numerics.sqnr_db(wanted, found) > (60 if recipe in {"bf16", "fp8"} else 30)


def test_fp8_weights_take_about_half_of_bf16s():
    made = model(tie_embeddings=True)
    bytes_of = {recipe: ModelRunner(made, recipe=recipe).weight_bytes for recipe in ("bf16", "fp8", "int8")}
    values = sum(p.numel() for p in made.parameters() if p.ndim == 2)
    rows = sum(len(p) for p in made.parameters() if p.ndim == 2)
    biases = sum(p.numel() for name, p in made.named_parameters() if name.endswith("bias"))
    assert bytes_of["bf16"] == 2 * values + 4 * biases
    assert bytes_of["fp8"] == bytes_of["int8"] == values + 4 * rows + 4 * biases


def test_an_embedding_of_bf16_numbers_is_kept_in_bf16():
    made = model()
    wide = ModelRunner(made, recipe="bf16").resident_bytes
    made.model.embed_tokens.weight.copy_(made.model.embed_tokens.weight.bfloat16())
    assert wide - ModelRunner(made, recipe="bf16").resident_bytes == 2 * made.model.embed_tokens.weight.numel()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("recipe", ["int8", "fp8-dynamic"])
def test_nan_and_inf_propagate(level, recipe):
    made = model()
    made.model.embed_tokens.weight[5, 0] = torch.inf
    runner = ModelRunner(made, recipe=recipe, level=level)
    cache = runner.new_cache(fmt=FP32)
    assert bool(runner(torch.tensor([4]), cache).isfinite().all())
    assert bool(runner(torch.tensor([5]), cache).isnan().all())


def test_stored_codes_are_not_quantized_again():
    made = model()
    octavo.convert(made, recipe="rowwise", frozen="fp8")
    for recipe in ("bf16", "int8"):
        with pytest.raises(ConfigError, match=f"FP8 codes, which {recipe} would round again"):
            ModelRunner(made, recipe=recipe)


def test_layers_with_one_input_need_one_static_scale():
    first, second = (octavo.nn.Linear(8, 8, recipe="static") for _ in range(2))
    first.input_scale.fill_(0.5)
    second.input_scale.fill_(0.25)
    with pytest.raises(ConfigError, match=r"same static scale, not \[0.5, 0.25\]"):
        decoder_weight(ServingRecipe.FP8_STATIC, first, second)


def test_mismatched_weights_and_casts_raise():
    numbers, integers = torch.randn(4, 8), quantize_int8(torch.randn(4, 8))
    for given, words in (
        ({"rows": numbers}, "cast nothing, not NONE"),
        ({"rows": numbers.bfloat16(), "input": InputCast.INT8_DYNAMIC}, "cast NONE, not INT8_DYNAMIC"),
        ({"rows": integers}, "an input of INT8 rows is cast INT8_DYNAMIC, not NONE"),
        ({"rows": numbers.bfloat16(), "bias": torch.zeros(3)}, r"has a bias \[4\], not \(3,\)"),
        ({"rows": numbers.bfloat16(), "input_scale": torch.ones(())}, "is for the cast E4M3_STATIC"),
        ({"rows": octavo.quantize(numbers, E4M3)}, "is cast nothing"),
    ):
        with pytest.raises(BackendError, match=words):
            DecoderWeight(**given)
    long = Int8Rows(torch.zeros(1, 131072, dtype=torch.int8), torch.ones(1, 1))
    with pytest.raises(BackendError, match="at most 131071 terms"):
        DecoderWeight(rows=long, input=InputCast.INT8_DYNAMIC)


@pytest.mark.parametrize("level", native_bindings.levels())
@pytest.mark.parametrize("k", [1, 31, 33, 297])
def test_integers_are_summed_exactly(level, k):
    """A head of one layer's decoder, whose logits are a product of integers times two scales."""
    generator = torch.Generator().manual_seed(k)
    config = tiny_llama_config(
        vocab_size=70,
        hidden_size=2 * k,
        intermediate_size=4,
        num_layers=1,
        num_heads=11 if k == 297 else k,
        num_kv_heads=1,
        max_positions=8,
    )
    made = Llama(config).requires_grad_(False)
    for name, parameter in made.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            parameter.zero_()
    embedding = made.get_parameter("model.embed_tokens.weight")
    made.lm_head.weight.copy_(torch.randn(70, 2 * k, generator=generator))
    runner = ModelRunner(made, recipe="int8", level=level)
    found = runner(torch.arange(5), runner.new_cache(fmt=FP32), every=True)
    normed = F.rms_norm(embedding[:5], (2 * k,), None, config.rms_norm_eps)
    x, weight = quantize_int8(normed), quantize_int8(made.lm_head.weight)
    exact = (x.data.long() @ weight.data.long().t()).float() * x.scale * weight.scale.t()
    torch.testing.assert_close(found, exact, rtol=3e-3, atol=2 * float(x.scale.max() * weight.scale.max()) * 130)

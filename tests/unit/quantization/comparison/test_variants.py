"""Each format computes what octavo, torch or torchao compute when they are called by hand, and the model stays."""

import copy
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

import octavo
from octavo.errors import CheckpointError, ConfigError
from octavo.language_model import LanguageModel
from octavo.quantization.comparison.kv_cache_round_trip import key_means
from octavo.quantization.comparison.variants import (
    CACHE,
    CENTRED,
    FORMATS,
    RECIPES,
    check_formats,
    from_recipe,
    high_precision,
    line_up,
    tuned,
    with_cache,
    with_scales,
)
from octavo.text.tokenizer import train_tokenizer
from tests.unit.quantization.tiny_models import LINEARS, SHAPE, VOCABULARY, language_model, windows

TOKENS = windows(2)
BF16 = torch.bfloat16


class StubCalibration:
    """A calibration that gives every layer the same scale."""

    def apply(self, model, *, hold_weights=False):
        paths = octavo.convert(model, "static", frozen="fp8" if hold_weights else None).converted
        octavo.load_scaling_state(model, {f"{path}.input.scale": torch.tensor(0.01) for path in paths})


def everything(model):
    """A contestant of every format whose library is there."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    made = replace(model, model=copy.deepcopy(model.model))
    StubCalibration().apply(made.model)
    means = key_means(model, windows())
    return line_up(model, FORMATS, calibration=StubCalibration(), tuned_model=made, means=means)


def rounded(model) -> Any:
    """A copy with BF16 values in FP32."""
    made = copy.deepcopy(model.model)
    for parameter in made.parameters():
        parameter.data = parameter.data.to(BF16).float()
    return made


@contextmanager
def surroundings():
    with torch.no_grad(), torch.autocast("cpu", BF16, cache_enabled=False):
        yield


def test_bf16_is_autocast_over_rounded_weights():
    model = language_model()
    plain = rounded(model)
    octavo.convert(plain, "bf16", convert_head=True)  # torch's own products, where this CPU has the instructions
    with surroundings():
        expected = plain(TOKENS)
    found = high_precision(model, "bf16").logits(TOKENS)
    assert found.dtype == BF16
    assert torch.equal(found, expected)


def test_bf16_is_torchs_bf16():
    """Without octavo's layers, to what the order of sums may move: an ulp of the logits."""
    model = language_model()
    with surroundings():
        expected = rounded(model)(TOKENS)
    torch.testing.assert_close(high_precision(model, "bf16").logits(TOKENS), expected, rtol=2**-6, atol=0.05)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_convert_by_hand(name):
    """All of it from BF16 weights: those of a checkpoint."""
    model = language_model()
    expected = rounded(model)
    report = octavo.convert(expected, RECIPES[name])
    octavo.convert(expected, "bf16", convert_head=True, layer_filter=lambda path, _: path == "lm_head")
    with surroundings():
        wanted = expected(TOKENS)
    made = from_recipe(model, name)
    assert made.quantized == report.converted
    assert torch.equal(made.logits(TOKENS), wanted)


def test_static_scales_are_applied():
    model = language_model()
    made = with_scales(model, StubCalibration())
    other = from_recipe(model, "fp8-dynamic")
    assert len(made.quantized) == LINEARS
    assert not torch.equal(made.logits(TOKENS), other.logits(TOKENS))
    first: Any = made.language_model.model.get_submodule("model.layers.0.self_attn.q_proj")
    assert first.recipe.name == "static"
    assert first.weight_codes.dtype == torch.float8_e4m3fn


def test_a_tuned_model_keeps_its_codes():
    """Its weights are cast as training left them, not after a rounding to BF16; the rest is rounded."""
    model = language_model()
    made = replace(model, model=copy.deepcopy(model.model))
    StubCalibration().apply(made.model)
    found = tuned(made)
    expected = rounded(model)
    for path in found.quantized:
        expected.get_parameter(f"{path}.weight").data = model.model.get_parameter(f"{path}.weight").data.clone()
    StubCalibration().apply(expected)
    octavo.convert(expected, "bf16", convert_head=True, layer_filter=lambda path, _: path == "lm_head")
    with surroundings():
        wanted = expected(TOKENS)
    assert torch.equal(found.logits(TOKENS), wanted)
    other = with_scales(model, StubCalibration())
    assert (found.quantized, found.storage) == (other.quantized, other.storage)
    assert not torch.equal(found.logits(TOKENS), other.logits(TOKENS)), "of weights that were rounded first"


def test_int8_runs_on_the_layers_that_fp8_runs_on():
    found = {contestant.name: contestant for contestant in everything(language_model())}
    assert found["int8"].quantized == found["fp8-dynamic"].quantized
    names = {
        type(found["int8"].language_model.model.get_submodule(path).weight).__name__ for path in found["int8"].quantized
    }
    assert names == {"Int8Tensor"}
    assert found["int8"].language_model.model.lm_head.weight.dtype == BF16


def test_int8_logits_are_those_of_torchao_by_hand():
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = language_model()
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.mul_(1.001)  # or norms, which are ones, would be in BF16 already
    expected: Any = copy.deepcopy(model.model).requires_grad_(False)
    for parameter in expected.parameters():
        parameter.data = parameter.data.to(BF16)
    for module in expected.modules():  # norms in FP32 on what is not rounded in between
        if not list(module.children()) and not isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            module.float()
    expected.model.embed_tokens.register_forward_hook(lambda _module, _inputs, output: output.float())
    config = quantization.Int8DynamicActivationInt8WeightConfig()
    quantization.quantize_(
        expected, config, filter_fn=lambda layer, path: isinstance(layer, torch.nn.Linear) and path != "lm_head"
    )
    for path, layer in expected.named_modules():
        if isinstance(layer, torch.nn.Linear) and path != "lm_head":
            layer.register_forward_pre_hook(lambda _, inputs: (inputs[0].to(BF16),))
    octavo.convert(expected, "bf16", convert_head=True, layer_filter=lambda path, _: path == "lm_head")
    with surroundings():
        wanted = expected(TOKENS)
    found = line_up(model, ["int8"])[0].logits(TOKENS)
    assert torch.equal(found, wanted)


def test_variants_do_not_change_the_model():
    """No byte, key, hook, class or requires_grad of it changes, whatever is made of it and runs."""
    model = language_model()
    before = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    kinds = [type(module) for module in model.model.modules()]
    with torch.no_grad():
        logits = model.logits(TOKENS)
    for contestant in everything(model):
        contestant.logits(TOKENS)
        assert contestant.storage.file_bytes
    after = model.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert kinds == [type(module) for module in model.model.modules()]
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in model.model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.model.modules())
    with torch.no_grad():
        assert torch.equal(model.logits(TOKENS), logits)
        assert torch.equal(high_precision(model, "fp32").logits(TOKENS), logits)


def test_the_tied_head_and_embedding_stay_one_tensor():
    made: Any = from_recipe(language_model(), "fp8-dynamic").language_model.model
    assert made.lm_head.weight is made.model.embed_tokens.weight
    assert made.lm_head.weight.dtype == BF16


@pytest.mark.parametrize("name", [CACHE, CENTRED])
def test_a_cache_changes_keys_and_values_alone(name):
    """The same weights; logits as of a model whose attention reads the cast by hand."""
    model = language_model()
    bf16 = high_precision(model, "bf16")
    means = key_means(model, windows()) if name == CENTRED else None
    made = with_cache(bf16, name, means)
    assert made.language_model is bf16.language_model
    seen = []

    cache: Any = made.cache

    def watch(layer, keys, values):
        seen.append((layer, keys.shape))
        return cache(layer, keys, values)

    with surroundings():
        expected = bf16.language_model.logits(TOKENS, watch)
    assert torch.equal(made.logits(TOKENS), expected)
    assert not torch.equal(bf16.logits(TOKENS), expected)
    shape = (*TOKENS.shape, SHAPE.num_kv_heads, SHAPE.head_dim)
    assert seen == [(0, shape), (1, shape)]


def test_bf16_is_always_among_the_compared_formats():
    assert check_formats(["fp8-dynamic", "bf16"]) == ("fp8-dynamic", "bf16")
    assert check_formats(["fp8-dynamic"]) == ("bf16", "fp8-dynamic")
    for names, words in (
        (["fp4"], "there is no format 'fp4' to compare; use some of fp32, bf16, int8, fp8-dynamic"),
        (["bf16", "bf16"], "distinct formats"),
        ([], "distinct formats, not none"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_formats(names)


@pytest.mark.parametrize("name", ["fp8-static", "fp8-qat", CENTRED])
def test_missing_requirement_of_a_format_is_named(name):
    with pytest.raises(ConfigError, match=f"{name} needs .* or leave {name} out"):
        line_up(language_model(), [name])


def test_a_tuned_model_of_other_tokens_is_refused():
    """Of the same shapes: only the tokenizer tells."""
    model = language_model()
    made = replace(
        model,
        model=copy.deepcopy(model.model),
        tokenizer=train_tokenizer(["quite another text"] * 9, vocab_size=VOCABULARY),
    )
    StubCalibration().apply(made.model)
    with pytest.raises(CheckpointError, match="another model: its tokenizer has other tokens; give the folder"):
        line_up(model, ["fp8-qat"], tuned_model=made)


@pytest.mark.parametrize("name", ["int8", "fp8-dynamic", "fp8-qat"])
def test_a_format_that_changes_no_layer_is_refused(name):
    """GPT-2 of transformers has Conv1D and a head: it would look as good as BF16."""
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0)
    model = replace(language_model(), model=transformers.GPT2LMHeadModel(config).eval())
    with pytest.raises(ConfigError, match="nothing to quantize; its weights are in Conv1D"):
        line_up(model, [name], tuned_model=model)


def test_progress_is_reported_for_each_variant():
    seen = []
    made = line_up(language_model(), ["bf16", "fp8-dynamic"], advance=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]
    assert [contestant.name for contestant in made] == ["bf16", "fp8-dynamic"]


def test_a_model_with_biases_and_layer_norms():
    """Vectors stay FP32, which torch's layer_norm insists on; biases are added as octavo.convert adds them."""
    layers: Any = torch.nn.Sequential(
        torch.nn.Embedding(30, 32),
        torch.nn.LayerNorm(32),
        torch.nn.Linear(32, 64),
        torch.nn.GELU(),
        torch.nn.Linear(64, 30),
    )
    with torch.no_grad():
        layers[2].bias.normal_()

    class FP32LanguageModel(LanguageModel):
        def logits(self, tokens, kv_transform=None):
            assert kv_transform is None
            model: Any = self.model
            found: torch.Tensor = model(tokens)
            return found

    plain = language_model()
    model = FP32LanguageModel(model=layers, tokenizer=plain.tokenizer, context=8, source="a test")
    tokens = torch.arange(8)[None]
    expected: Any = copy.deepcopy(layers)
    for parameter in expected.parameters():
        parameter.data = parameter.data.to(BF16).float()
    octavo.convert(expected, "tensorwise")
    with surroundings():
        wanted = expected(tokens)
    made = from_recipe(model, "fp8-dynamic")
    assert made.quantized == ("2", "4")
    assert torch.equal(made.logits(tokens), wanted)
    layers[2].bias.data.zero_()
    assert not torch.equal(from_recipe(model, "fp8-dynamic").logits(tokens), wanted)

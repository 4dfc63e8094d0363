"""compressed-tensors, the library, reads what octavo writes and computes the same: transformers in a fresh process.

Also of a model that is no Llama and has biases. What it finds with a mistake is in tests/unit/export/test_lockstep.py.
"""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import octavo
from octavo.checkpoints import load_quantized
from octavo.export.checkpoint_writer import save_quantized
from octavo.language_model import LanguageModel, load_language_model
from octavo.models import Llama
from octavo.text.tokenizer import train_tokenizer
from tests.unit.checkpoints.folders import LAYER, ROW, layer_of, static, verdict
from tests.unit.quantization.tiny_models import language_model

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        find_spec("compressed_tensors") is None or find_spec("transformers") is None,
        reason="compressed-tensors or transformers is not installed",
    ),
]
VOCABULARY = 300


@pytest.fixture(params=[("Qwen2", {}), ("Qwen3", {"head_dim": 48, "attention_bias": True})], ids=str)
def biased(request, tmp_path):
    """A model whose queries, keys and values have biases, in 192 wide rows: no multiple of 128."""
    import transformers

    name, settings = request.param
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.1,
        **settings,
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    model.save_pretrained(tmp_path / "qwen")
    tokenizer = train_tokenizer(["some text, some more text"] * 3, vocab_size=VOCABULARY)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "qwen")
    return load_language_model(tmp_path / "qwen")


@pytest.mark.usefixtures("forked_verification")
def test_tokens_in_one_dimension_are_verified_token_by_token(tmp_path):
    """OPT's fc1 is given [B·T, K], of which compressed-tensors takes one scale for all tokens."""
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 96, "num_attention_heads": 2}
    config = OPTConfig(vocab_size=300, num_hidden_layers=1, max_position_embeddings=64, init_std=0.1, **sizes)
    given = LanguageModel(
        model=OPTForCausalLM(config).eval(), tokenizer=language_model().tokenizer, context=64, source=""
    )
    octavo.convert(given.model, ROW)
    saved = save_quantized(given, tmp_path / "tokens")
    assert verdict(saved).worst_error < 1e-6
    assert "by one scale in 'model.decoder.layers.0.fc1' and 1 more, where inputs" in saved.notes[-1]
    octavo.convert(given.model, ROW, overrides={"*.fc?": "weight_only"})
    saved = save_quantized(given, tmp_path / "weights")
    assert verdict(saved).worst_error < 1e-6
    assert not saved.notes


def test_a_biased_model_with_mixed_schemes(biased, tmp_path):
    report = octavo.convert(
        biased.model,
        "rowwise",
        skip=["*.0.mlp.gate_proj"],
        overrides={"*.down_proj": "weight_only", "*.k_proj": "tensorwise"},
    )
    assert len(report.converted) == 13
    saved = save_quantized(biased, tmp_path / "m")
    assert saved.reader == "transformers"
    assert verdict(saved).logits_error < 1e-5
    assert verdict(saved).worst_error < 1e-5
    assert verdict(saved).greedy_equal == verdict(saved).greedy_tokens
    written = load_file(tmp_path / "m" / "model.safetensors")
    assert written["model.layers.0.self_attn.k_proj.bias"].abs().max() > 0.5
    assert (tmp_path / "m" / "generation_config.json").is_file()
    _reads_its_own(tmp_path / "m", biased)


def _reads_its_own(folder, original):
    """Octavo's importer builds the model too, as its own Llama with biases."""
    read = load_quantized(folder)
    model = LanguageModel(model=read.model, tokenizer=read.tokenizer, context=read.context, source=str(folder))
    assert isinstance(read.model, Llama)
    bias = "model.layers.0.self_attn.q_proj"
    ours, theirs = (layer_of(each, bias).bias for each in (read.model, original.model))
    assert torch.equal(ours, theirs.bfloat16().float())
    save_quantized(model, folder.with_name("again"), verify_folder=False)
    assert (folder / "model.safetensors").read_bytes() == (folder.with_name("again") / "model.safetensors").read_bytes()


@pytest.mark.usefixtures("forked_verification")
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_static_inputs_and_the_cache(tmp_path, granularity):
    model, scales = static(granularity, kv_cache=True)
    saved = save_quantized(model, tmp_path / "m", kv_scales=scales)
    assert saved.reader == "transformers"
    assert verdict(saved).logits_error < 1e-4
    assert verdict(saved).greedy_equal == verdict(saved).greedy_tokens
    assert load_file(tmp_path / "m" / "model.safetensors")[f"{LAYER}.input_scale"].shape == (1,)

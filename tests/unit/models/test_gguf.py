"""Models out of GGUF files: the weights and logits that transformers finds in the same file; what is refused."""

import math
import re
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import smollm2
from octavo.errors import CheckpointError, ConfigError
from octavo.models import generate, load_gguf
from octavo.quantization.comparison.evaluation_text import topic_tokens
from octavo.training.evaluate import token_loss
from tests.unit.models import small_gguf
from tests.unit.models.small_gguf import BOS, EOS, HEADS, HIDDEN, NOTE, weights, write


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("encoding", small_gguf.ENCODINGS)
def test_weights_and_logits_are_those_that_transformers_finds(tmp_path, encoding, tied):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    path = write(tmp_path / "model.gguf", weights(tied=tied), encoding=encoding)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    ours = load_gguf(path).model
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in ours.state_dict().items())
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == tied
    tokens = torch.randint(ours.config.vocab_size, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def test_parameters_take_the_dtype_and_positions_stay_fp32(tmp_path):
    path = write(tmp_path / "model.gguf", encoding="Q4_1")
    wide, low = load_gguf(path).model, load_gguf(path, dtype=torch.bfloat16).model
    for name, parameter in wide.named_parameters():
        assert torch.equal(parameter.bfloat16(), low.get_parameter(name))
        assert parameter.requires_grad
    assert low.model.cos.dtype == torch.float32
    with torch.no_grad():
        assert low(torch.zeros(1, 4, dtype=torch.long)).dtype == torch.bfloat16


def test_token_ids_and_chat_template_are_read(tmp_path):
    found = load_gguf(write(tmp_path / "model.gguf"))
    assert (found.bos_id, found.eos_id, found.chat_template) == (0, 1, "{{ messages }}")
    assert (found.model.config.max_positions, found.model.config.rope_theta) == (32, 100.0)
    bare = dict.fromkeys(("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id", "tokenizer.chat_template"))
    less = load_gguf(write(tmp_path / "bare.gguf", settings=bare))
    assert (less.bos_id, less.eos_id, less.chat_template) == (None, None, None)


def test_a_setting_that_is_the_default_may_be_missing(tmp_path):
    tensors = weights()
    tensors |= {f"blk.{i}.attn_{kind}.weight": tensors["blk.0.attn_q.weight"] for i in range(2) for kind in "kv"}
    absent = dict.fromkeys(("llama.attention.head_count_kv", "llama.rope.freq_base", "llama.vocab_size"))
    config = load_gguf(write(tmp_path / "model.gguf", tensors, settings=absent)).model.config
    assert (config.num_kv_heads, config.rope_theta) == (HEADS, 10000.0)


def test_settings_without_effect_are_taken(tmp_path):
    settings = {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 2.0, "llama.expert_count": 0}
    settings |= {"llama.attention.key_length": HIDDEN // HEADS, "general.name": "small"}
    model, plain = (
        load_gguf(write(tmp_path / f"{name}.gguf", settings=each)).model
        for name, each in (("with", settings), ("without", {}))
    )
    assert model.config == plain.config
    assert torch.equal(model.model.cos, plain.model.cos)


def test_text_is_split_and_joined_as_the_file_says(tmp_path):
    tokenizer = load_gguf(write(tmp_path / "model.gguf")).tokenizer
    assert tokenizer.encode("the 12").tokens == ["t", "he", "Ġ", "1", "2"]
    assert tokenizer.encode(f"in the{EOS} {NOTE}").tokens == ["i", "n", "Ġthe", EOS, "Ġ", NOTE]
    text = "Ünïcode, 12 lines\n\tand \x00 bytes"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.decode([0, *tokenizer.encode(f"{NOTE}a").ids, 1]) == f"{NOTE}a"  # control tokens are no text
    joined = load_gguf(write(tmp_path / "joined.gguf", settings={"tokenizer.ggml.pre": "gpt-2"})).tokenizer
    assert joined.encode("the 12").tokens == ["t", "he", "Ġ", "12"]


@pytest.mark.parametrize(
    ("asked", "tokens"),
    [(("bos",), [BOS, "a"]), (("eos",), ["a", EOS]), (("bos", "eos"), [BOS, "a", EOS])],
    ids=str,
)
def test_begin_and_end_tokens_are_added_if_the_file_says_so(tmp_path, asked, tokens):
    settings = {f"tokenizer.ggml.add_{end}_token": True for end in asked}
    tokenizer = load_gguf(write(tmp_path / "model.gguf", settings=settings)).tokenizer
    assert tokenizer.encode("a").tokens == tokens
    assert tokenizer.encode("a", add_special_tokens=False).tokens == ["a"]


def test_tensors_are_loaded_one_at_a_time(tmp_path, monkeypatch):
    tensors = weights()
    path = write(tmp_path / "model.gguf", tensors, encoding="Q8_0")
    monkeypatch.setattr("octavo.models.gguf_file.DECODED_AT_ONCE", 1024)
    load_gguf(path)  # what the libraries keep is made now
    tracemalloc.start()  # sees numpy's memory, not torch's: what is decoded, not what is handed out
    try:
        found = load_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200_000 < sum(tensor.nbytes for tensor in tensors.values())
    assert found.model.config.hidden_size == HIDDEN


def changed(**tensors):
    """The tensors with some replaced, by the file's names with "__" for the dots; None leaves one out."""
    found = {**weights(), **{name.replace("__", "."): tensor for name, tensor in tensors.items()}}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


NAME = "tokenizer.ggml."
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architecture": "qwen2"}, "architecture 'qwen2'; octavo reads 'llama'"),
    "biases": ({"tensors": changed(blk__0__attn_q__bias=np.zeros(HIDDEN, np.float32))}, "has blk.0.attn_q.bias, which"),
    "scaled frequencies": ({"tensors": changed(rope_freqs__weight=np.ones(8, np.float32))}, "has rope_freqs.weight"),
    "scaled positions": ({"llama.rope.scaling.type": "linear"}, "'linear' as llama.rope.scaling.type"),
    "scaled by default": (
        {"llama.rope.scaling.factor": 2.0},
        "unknown settings, which may .* llama.rope.scaling.factor",
    ),
    "heads of their own width": ({"llama.attention.key_length": 32}, "32 as llama.attention.key_length; .* only 16"),
    "part of a head turned": ({"llama.rope.dimension_count": 8}, "8 as llama.rope.dimension_count"),
    "experts": ({"llama.expert_count": 8}, "8 as llama.expert_count"),
    "unknown setting": ({"llama.logit_scale": 0.5}, "unknown settings.*: llama.logit_scale"),
    "missing tensor": ({"tensors": changed(blk__1__ffn_up__weight=None)}, "has no blk.1.ffn_up.weight; it is not"),
    "missing layer": ({"llama.block_count": 3}, "no blk.2.attn_norm.weight, .* and 6 more; it is not a complete"),
    "many missing layers": ({"llama.block_count": 5000}, "5000 layers and has 20 tensors"),
    "layers without end": ({"llama.block_count": 2**32 - 1}, "num_layers must be at most 10,000, not 4,294,967,295"),
    "wrong shape": (
        {"tensors": changed(blk__1__ffn_up__weight=np.zeros((95, 64), np.float32))},
        r"ffn_up.* \(95, 64\)",
    ),
    "transposed": (
        {"tensors": changed(blk__0__ffn_down__weight=np.zeros((96, 64), np.float32))},
        r"require \(64, 96\)",
    ),
    "wrong vocabulary": (
        {f"{NAME}tokens": small_gguf.TOKENS[:-1], f"{NAME}merges": ["1 2"], f"{NAME}token_type": None},
        "token_embd.weight of sh",
    ),
    "wrong token types": ({f"{NAME}token_type": [1]}, "damaged tokenizer: 263 tokens and 1 token types"),
    "too many positions": ({"llama.context_length": 2**22}, "4194304 positions"),
    "positions without end": (
        {"llama.context_length": 2**32 - 1},
        "max_positions must be at most 16,777,216, not 4,294,",
    ),
    "missing setting": ({"llama.embedding_length": None}, "has no llama.embedding_length"),
    "setting of a kind": (
        {"llama.embedding_length": "wide"},
        "'wide' as llama.embedding_length, which must be of type int",
    ),
    "heads that differ": (
        {"llama.attention.head_count_kv": [2, 1]},
        r"has \[2, 1\] as llama.attention.head_count_kv",
    ),
    "heads that do not divide": (
        {"llama.attention.head_count": 5},
        "octavo's Llama does not support: hidden_size must",
    ),
    "no tokenizer": ({f"{NAME}tokens": None}, "has no tokenizer.ggml.tokens"),
    "sentencepiece": ({f"{NAME}model": "llama"}, "tokenizer of model 'llama'"),
    "another split": ({f"{NAME}pre": "llama-bpe"}, "splits text as 'llama-bpe'; octavo reads 'gpt2' with 'gpt-2' or"),
    "a token twice": ({f"{NAME}tokens": [*small_gguf.TOKENS[:-1], "a"]}, "a token is duplicated"),
    "tokens of numbers": ({f"{NAME}tokens": [*range(len(small_gguf.TOKENS))]}, "or not text"),
    "an unknown merge": ({f"{NAME}merges": ["zz yy"]}, "damaged tokenizer: .*zz"),
    "a merge of one": ({f"{NAME}merges": ["the"]}, "damaged tokenizer: "),
    "an id without a token": ({f"{NAME}bos_token_id": 999}, "999 as tokenizer.ggml.bos_token_id"),
    "an end without a token": (
        {f"{NAME}add_eos_token": True, f"{NAME}eos_token_id": None},
        "sets add_eos_token but has no eos_token_id",
    ),
    "whole numbers": ({"tensors": changed(output_norm__weight=np.ones(HIDDEN, np.int8))}, "output_norm.weight as I8"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_models_are_refused(tmp_path, what):
    wrong, message = REFUSED[what]
    settings = {name: value for name, value in wrong.items() if "." in name}
    path = write(
        tmp_path / "model.gguf",
        wrong.get("tensors"),
        architecture=wrong.get("architecture", "llama"),
        settings=settings,
    )
    with pytest.raises(CheckpointError, match=message) as raised:
        load_gguf(path)
    assert re.match(re.escape(str(path)), str(raised.value))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_parameters_are_floats_of_two_bytes_or_more(tmp_path, dtype):
    with pytest.raises(ConfigError, match="parameters are loaded as float32"):
        load_gguf(tmp_path / "model.gguf", dtype=dtype)


# The mean loss of transformers' model from the same file over tokens 0 to 511 of the text.
LOSS_OF_THE_FIRST_WINDOW = 2.8810


@pytest.mark.skipif(smollm2.cached() is None, reason="SmolLM2 is not here; python -m benchmarks.smollm2 gets it")
def test_the_real_model_reads_and_writes():
    found = load_gguf(smollm2.model_path())
    assert found.tokenizer.encode("12 mice").tokens == ["1", "2", "Ġmice"]
    prompt = found.tokenizer.encode("The capital of France is").ids
    told = list(generate(found.model, prompt, max_new_tokens=1, temperature=0, context=64))
    assert found.tokenizer.decode(told) == " Paris"
    tokens = torch.tensor([topic_tokens(found.tokenizer, 512)])
    with torch.no_grad():
        loss = token_loss(found.model(tokens[:, :-1]), tokens[:, 1:])
    assert math.isclose(loss, LOSS_OF_THE_FIRST_WINDOW, abs_tol=1e-4)

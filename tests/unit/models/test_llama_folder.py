"""A Llama's folder: what its records say, and how transformers reads it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, MistralConfig, Qwen3Config

from octavo.errors import ConfigError
from octavo.models import Llama, LlamaConfig
from octavo.models.llama_folder import config_record, read_llama, shape_from_record, write_llama, write_tokenizer
from octavo.nn import RotaryScaling
from tests.tiny_llama import tiny_llama_config
from tests.unit.quantization.tiny_model import tiny_language_model

SHAPE = tiny_llama_config(hidden_size=64, intermediate_size=96, rope_theta=5e5, tie_embeddings=True)
SCALING = RotaryScaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=24)
ROPE: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 24, "rope_theta": 5e5}
RECORD = config_record(SHAPE, torch.bfloat16)


def test_config_record_round_trips():
    assert shape_from_record(RECORD) == SHAPE
    assert RECORD["dtype"] == "bfloat16"


def test_missing_keys_of_older_records_have_defaults():
    older = {key: value for key, value in RECORD.items() if key not in ("rope_parameters", "tie_word_embeddings")}
    assert shape_from_record(older | {"num_key_value_heads": None, "tie_word_embeddings": True}) == LlamaConfig(
        **{name: getattr(SHAPE, name) for name in SHAPE.__slots__} | {"num_kv_heads": 4}
    )
    scaled = older | {"rope_scaling": ROPE, "tie_word_embeddings": True}  # as Llama 3.1's config.json has it
    assert shape_from_record(scaled) == replace(SHAPE, rope_scaling=SCALING)
    newer = {key: value for key, value in RECORD.items() if key != "rope_theta"}
    assert shape_from_record(newer) == SHAPE
    assert shape_from_record(RECORD | {"head_dim": 16}) == SHAPE


@pytest.mark.parametrize(
    "other",
    [
        {"model_type": "gemma3_text"},
        {"model_type": "qwen2", "use_sliding_window": True},
        {"model_type": "qwen3", "use_sliding_window": True},
        {"model_type": "mistral", "sliding_window": 63},
        {"model_type": "mistral", "max_position_embeddings": 4097},
        {"model_type": "mistral", "sliding_window": "long"},
        {"hidden_act": "gelu"},
        {"head_dim": 31},
        {"head_dim": "wide"},
        {"num_attention_heads": 0},
        {"pretraining_tp": 2},
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_parameters": ROPE | {"factor": 0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 8.0}},
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"hidden_size": 63, "head_dim": None},
        {"vocab_size": "many"},
    ],
)
def test_unsupported_configs_give_no_shape(other):
    assert shape_from_record(RECORD | other) is None


def test_a_sliding_window_over_all_positions_hides_nothing():
    assert MistralConfig().sliding_window == 4096
    for window in ({}, {"sliding_window": None}, {"sliding_window": 64}):
        assert shape_from_record(RECORD | {"model_type": "mistral"} | window) == SHAPE


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": SCALING},
        {"qk_norm": "head"},
        {"qk_norm": "head", "head_size": 32, "qkv_bias": True, "out_bias": True},
        {"head_size": 32},
        {"head_size": 32, "qkv_bias": True, "out_bias": True, "mlp_bias": True},
        {"qkv_bias": True},
        {"qkv_bias": True, "out_bias": True},
        {"mlp_bias": True},
        {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
    ],
    ids="+".join,
)
def test_transformers_reads_a_folder_as_the_same_model(tmp_path, changes):
    shape = replace(SHAPE, **changes)
    model = Llama(shape, seed=2).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    write_llama(tmp_path, model)
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=1e-4, atol=1e-4)
    assert shape_from_record(theirs.config.to_dict()) == shape
    assert torch.equal(read_llama(tmp_path)(tokens), model(tokens))


@pytest.mark.parametrize(
    "changes",
    [
        {"out_bias": True},
        {"qkv_bias": True, "mlp_bias": True},
        {"qkv_bias": True, "head_size": 32},
        {"qkv_bias": True, "qk_norm": "head"},
        {"mlp_bias": True, "qk_norm": "head"},
    ],
    ids="+".join,
)
def test_layers_that_no_folder_has_are_refused(changes):
    with pytest.raises(ConfigError, match="biases of queries, keys and values alone"):
        config_record(replace(SHAPE, **changes), torch.float32)


def test_qwen3s_heads_are_128_wide_unless_its_record_says_otherwise():
    record = config_record(replace(SHAPE, qk_norm="head"), torch.float32)
    del record["head_dim"]
    assert shape_from_record(record) == replace(SHAPE, qk_norm="head", head_size=128)
    assert Qwen3Config().head_dim == 128


@pytest.mark.parametrize("changes", [{"num_experts": 2, "experts_per_token": 1}, {"qk_norm": "row"}])
def test_a_folder_of_another_layout_is_not_written(changes):
    with pytest.raises(
        ConfigError, match="octavo writes no Hugging Face folder of a Llama with experts or with qk_norm"
    ):
        config_record(tiny_llama_config(**changes), torch.float32)


def test_new_biases_are_zero():
    shape = replace(SHAPE, qkv_bias=True, out_bias=True, mlp_bias=True)
    biases = [value for name, value in Llama(shape).named_parameters() if name.endswith("bias")]
    assert len(biases) == 7 * shape.num_layers
    assert not any(bool(value.any()) for value in biases)


def test_the_tokens_at_the_ends_of_a_text_are_written_where_they_are_known(tmp_path):
    """Transformers' own reading of the folder: its tokenizer's and its generation's."""
    model = tiny_language_model()
    begins, ends = (model.tokenizer.id_to_token(number) for number in (5, 7))
    known = replace(model, bos_id=5, eos_id=7)
    for name, given in (("known", known), ("unknown", model)):
        (tmp_path / name).mkdir()
        assert isinstance(given.model, Llama)
        write_llama(tmp_path / name, given.model)
        write_tokenizer(tmp_path / name, given.tokenizer, context=32, bos_id=given.bos_id, eos_id=given.eos_id)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "known")
    generation = GenerationConfig.from_pretrained(tmp_path / "known")
    assert (tokenizer.bos_token, tokenizer.eos_token) == (begins, ends)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (5, 7)
    assert (generation.bos_token_id, generation.eos_token_id) == (5, 7)
    assert not (tmp_path / "unknown" / "generation_config.json").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "unknown").eos_token is None

"""A Llama's folder: what its records say, and how transformers reads it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

from octavo.models import Llama, LlamaConfig
from octavo.models.llama_folder import config_record, shape_from_record, write_llama, write_tokenizer
from tests.unit.quantization.tiny_model import tiny_language_model

SHAPE = LlamaConfig(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    max_positions=64,
    rope_theta=5e5,
    tie_embeddings=True,
)
RECORD = config_record(SHAPE, torch.bfloat16)


def test_a_record_of_octavos_comes_back():
    assert shape_from_record(RECORD) == SHAPE
    assert RECORD["dtype"] == "bfloat16"


def test_what_older_records_leave_out():
    older = {key: value for key, value in RECORD.items() if key not in ("rope_parameters", "tie_word_embeddings")}
    assert shape_from_record(older | {"num_key_value_heads": None, "tie_word_embeddings": True}) == LlamaConfig(
        **{name: getattr(SHAPE, name) for name in SHAPE.__slots__} | {"num_kv_heads": 4}
    )
    newer = {key: value for key, value in RECORD.items() if key != "rope_theta"}
    assert shape_from_record(newer) == SHAPE
    assert shape_from_record(RECORD | {"head_dim": 16}) == SHAPE


@pytest.mark.parametrize(
    "other",
    [
        {"model_type": "qwen2"},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"hidden_act": "gelu"},
        {"head_dim": 32},
        {"pretraining_tp": 2},
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"hidden_size": 63},
        {"vocab_size": "many"},
    ],
)
def test_what_octavos_llama_is_not(other):
    assert shape_from_record(RECORD | other) is None


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

import pytest
import torch

from octavo.models import LlamaConfig
from octavo.models.llama_folder import config_record, shape_from_record

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

"""Parameters and FLOPs of shapes against transformers' models, published counts and torch's counter of FLOPs."""

import json
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

from octavo.errors import ConfigError, DataError
from octavo.planning import find_model, load_shape, model_names
from octavo.planning.model_config import shape_of_config
from octavo.planning.model_shapes import ModelShape

CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(
        num_hidden_layers=3,
        hidden_size=128,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=352,
        vocab_size=1000,
    ),
    "tied": LlamaConfig(
        num_hidden_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        intermediate_size=128,
        vocab_size=500,
        tie_word_embeddings=True,
    ),
    "mixtral": MixtralConfig(
        num_hidden_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=300,
    ),
    "qwen3-moe": Qwen3MoeConfig.from_dict(
        {
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "moe_intermediate_size": 48,
            "intermediate_size": 96,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "vocab_size": 300,
        }
    ),
    "deepseek-v3": DeepseekV3Config.from_dict(
        {
            "num_hidden_layers": 3,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "vocab_size": 300,
            "num_nextn_predict_layers": 0,
        }
    ),
}
PUBLISHED = {  # billions of parameters, by the models' cards and papers
    "Llama-3.1-8B": 8.03,
    "Llama-3.1-70B": 70.55,
    "Llama-3.1-405B": 405.85,
    "Mixtral-8x7B": 46.7,
    "DeepSeekV3 (w/o MTP)": 671,
    "Qwen3-30B-a3B": 30.5,
    "Qwen3-235B-A22B": 235,
    "GPT-3-175B": 175,
    "Nemotron-4-340B": 341,
    "Grok-1-314B": 314,
    "GPT-OSS-120B": 116.8,
    "Kimi-K2": 1026,
    "MPT-30b": 29.97,
    "Nemotron-H-56B": 56,
    "Gemma-2-27B": 27.2,
    "Mistral-Small-24B": 23.6,
    "Mistral-Large-2407": 122.6,
    "Nemotron-3-Super-120B-A12B": 120.6,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_model_that_transformers_builds(name):
    config = CONFIGS[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() > 1)
    assert shape_of_config(config.to_dict(), name=name).parameters == matrices


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_parameters_are_those_that_were_published(name, billions):
    assert find_model(name).parameters / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("name", ["llama", "tied"])
def test_flops_of_linear_layers_are_those_that_torch_counts(name):
    config, tokens = CONFIGS[name], 16
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, tokens, dtype=torch.long))
    shape = shape_of_config(config.to_dict(), name=name)
    linear = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert linear == 2 * tokens * shape.active_parameters
    attention = counter.get_flop_counts()["Global"][torch.ops.aten.bmm]
    full = ModelShape(
        name="not causal",
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        vocab=shape.vocab,
        kv_heads=shape.kv_heads,
        ffn=shape.ffn,
        causal=False,
    )
    assert attention == pytest.approx(tokens * full.attention_flops(tokens), rel=0.01)  # rotary's table is 0.5 %


def test_every_spelling_names_a_model_of_the_table():
    names = {
        "LLAMA3-70B SFT": "llama-3-70b",
        "meta-llama/Llama-3.1-8B-Instruct": "llama-3-8b",
        "Llama-2-70B (MaxText/JAX)": "llama-2-70b",
        "GPT-5B (Paxml/JAX)": "gpt-5b",
        "Qwen3-MoE-30B": "qwen-3-30b-a3b",
        "DeepSeekV3 (tokendrop)": "deepseek-v3",
        "MPT-7b (6658859008 params)": "mpt-7b",
        "Nemotron-V3-Super-120B": "nemotron-3-super",
    }
    assert {text: find_model(text).name for text in names} == names
    assert [find_model(name).name for name in model_names()] == list(model_names())


def test_a_name_with_a_size_alone_gets_usual_proportions():
    assert find_model("Unheard-13B").parameters / 1e9 == pytest.approx(13, rel=0.15)
    with pytest.raises(ConfigError, match=r"give a config\.json"):
        find_model("a model without a size")


@pytest.mark.parametrize("size", [(30, 3), (80, 3), (100, 9), (235, 22), (397, 17), (1000, 32), (47, 13), (7, 1)])
def test_a_mixture_known_by_two_sizes_has_both(size):
    found = find_model("Unheard-{}B-A{}B".format(*size))
    assert found.parameters / 1e9 == pytest.approx(size[0], rel=0.05)
    assert found.active_parameters / 1e9 == pytest.approx(size[1], rel=0.05)


def test_a_mixture_known_by_one_size():
    """Of 8x7B, each token meets two of eight MLPs of a model of 7B: Mixtral's own numbers are 46.7 and 12.9 billion."""
    found = find_model("Unheard MoE 8x7B")
    assert (found.experts, found.top_k) == (8, 2)
    assert found.parameters / 1e9 == pytest.approx(46.7, rel=0.2)
    assert found.active_parameters / 1e9 == pytest.approx(12.9, rel=0.2)
    assert find_model("DeepSeek V3 16B").name == "deepseek-v2-lite", "torchtitan's name of that shape"
    for name in ("Unheard MoE 16B", "DeepSeek-V3 30B"):
        with pytest.raises(ConfigError, match="write both, as 30B-A3B"):
            find_model(name)


@pytest.mark.parametrize(
    "name", ["Granite-3.1-8B", "Llama-3.3-Nemotron-Super-49B", "llama-3.2-90b-vision", "U-100B-A9B"]
)
def test_a_guessed_shape_shares_keys_and_says_that_it_is_guessed(name):
    shape = find_model(name)
    assert shape.guessed
    assert "guessed shape" in shape.name
    assert shape.key_heads == 8 < shape.heads


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("LLAMA31-405B", "llama-3-405b"),
        ("llama3_1_405b", "llama-3-405b"),
        ("Llama3p2-1B", "llama-3-1b"),
        ("llama-3-1b", "llama-3-1b"),
        ("llama33_70b_instruct", "llama-3-70b"),
        ("qwen2_5_7b", "qwen-2-7b"),
        ("glm-4-5-air", "glm-4.5-air"),
        ("DeepSeek-R1-Distill-Llama-70B", "llama-3-70b"),
        ("DeepSeek-R1-Distill-Qwen-1.5B", "qwen-2-1.5b"),
        ("DeepSeek-R1-0528-Qwen3-8B", "qwen-3-8b"),
        ("DeepSeek-R1", "deepseek-v3"),
        ("Llama-3.1-Nemotron-70B", "llama-3-70b"),
        ("Devstral-24B", "mistral-24b"),
        ("Phi-3.5-mini", "phi-3-mini"),
        ("Phi-4-mini", "phi-4-mini"),
        ("Qwen1.5-MoE-A2.7B", "qwen-1.5-moe-a2.7b"),
        ("Llama-4-Scout-17B-16E", "llama-4-scout"),
        ("ViT-L/16", "vit-l"),
        ("DiT-XL/2", "dit-xl"),
        ("Llama 70B 2 layers", "llama-3-70b, 2 layers"),
        ("Llama-3-8B (32 layers)", "llama-3-8b"),
    ],
)
def test_a_name_is_read_by_its_base(name, base):
    assert find_model(name).name == base


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("BLOOM-560m", 0.56),
        ("bloom-7b1", 7),
        ("Hunyuan-7B", 7),
        ("GPT-NeoX-1.3B", 1.3),
        ("Command-R7B", 7),
        ("GLM-4-32B", 32),
        ("DeepSeek-R1-Distill-Unheard-5B", 5),
    ],
)
def test_a_size_in_the_name_counts_more_than_a_spelling(name, billions):
    shape = find_model(name)
    assert shape.guessed
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.05)


@pytest.mark.parametrize("name", ["Llama-4-Behemoth", "T5-11B", "Flux-12B", "Mamba-2.8B", "Wan-2.1-14B", "Jamba-52B"])
def test_a_model_of_another_kind_has_no_shape(name):
    with pytest.raises(ConfigError, match="no shape is known"):
        find_model(name)


def test_layers_are_cut_and_prediction_layers_left_out():
    assert find_model("Grok-1-314B cut to 4 layers").layers == 4
    assert find_model("DeepSeekV3 (w/o MTP)").attention_count == 61
    assert find_model("DeepSeekV3").attention_count == 62


def test_a_configuration_is_read_from_its_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"].to_dict(), default=str))
    assert load_shape(str(tmp_path)).parameters == load_shape(str(tmp_path / "config.json")).parameters
    (tmp_path / "config.json").write_text('{"hidden_size": 4}')
    with pytest.raises(ConfigError, match="no number of layers"):
        load_shape(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"give a model's config\.json"):
        load_shape(str(tmp_path))


def test_gpt2_has_no_gate():
    config = GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=200, n_positions=32)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = sum(
        weight.numel() for name, weight in model.named_parameters() if weight.dim() > 1 and "wpe" not in name
    )
    assert shape_of_config(config.to_dict(), name="gpt2").parameters == matrices


@pytest.mark.parametrize("name", ["nanochat-d" + "9" * 330, "llama-3-8b cut to " + "9" * 330 + " layers"])
def test_numbers_of_a_shape_have_bounds(name):
    with pytest.raises(ConfigError, match="a model's layers must be 1 to 10,000, not 99999999999999999999"):
        find_model(name)

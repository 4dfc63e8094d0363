"""Configurations with layers of several kinds, against the models that transformers builds of them."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, ViTConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from octavo.errors import ConfigError
from octavo.planning.model_config import shape_of_config
from octavo.planning.model_names import find_model

EIGHT = {"num_hidden_layers": 8}
GRANITE = EIGHT | {
    "layer_types": ["mamba", "mamba", "mamba", "attention"] * 2,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "mamba_n_heads": 32,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "intermediate_size": 512,
    "shared_intermediate_size": 2048,
}
CONFIGS: dict[str, tuple[str, dict[str, Any], dict[str, object]]] = {
    "gpt-oss-120b": ("gpt_oss", {}, {"window_layers": 18, "window": 128, "gated": True}),
    "jamba": ("jamba", EIGHT, {"attention_layers": 1, "mamba_layers": 7, "dense_layers": 4}),
    "granite-4-h": ("granitemoehybrid", GRANITE | {"num_local_experts": 0}, {"mamba_layers": 6}),
    "granite-4-h-moe": (
        "granitemoehybrid",
        GRANITE | {"num_local_experts": 8, "num_experts_per_tok": 2},
        {"attention_layers": 2},
    ),
    "qwen3-next": ("qwen3_next", EIGHT, {"attention_layers": 2, "mamba_layers": 6}),
    "falcon-7b": ("falcon", {}, {"kv_heads": 1}),
    "gemma-2": ("gemma2", {}, {"window_layers": 13, "tied": True}),
    "gemma-3": ("gemma3_text", {}, {"window_layers": 22, "tied": True}),
    "qwen-2": ("qwen2", {}, {"window": 0}),
    "llama-4": ("llama4_text", {"num_hidden_layers": 4}, {"window_layers": 3, "window": 8192}),
}


def config_of(kind: str, settings: dict[str, Any]) -> Any:
    build: Any = CONFIG_MAPPING[kind]
    return build(**settings)


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_of_several_kinds_have_the_parameters_that_transformers_builds(name):
    kind, settings, fields = CONFIGS[name]
    config = config_of(kind, settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() > 1)
    shape = shape_of_config(config.to_dict(), name=name)
    assert shape.parameters == pytest.approx(matrices, rel=0.005)  # biases of experts, convolutions, steps of Mamba-1
    assert {field: getattr(shape, field) for field in fields} == fields


def test_periods_place_layers_where_nothing_lists_them():
    for kind, period in (("jamba", "attn_layer_period"), ("qwen3_next", "full_attention_interval")):
        config = config_of(kind, EIGHT).to_dict()
        listed = shape_of_config(config, name=kind)
        every = 8 // listed.attention_count
        assert shape_of_config(config | {"layer_types": None, period: every}, name=kind) == listed
    config = config_of("gemma3_text", {"num_hidden_layers": 26}).to_dict() | {"layer_types": None}
    assert shape_of_config(config | {"sliding_window_pattern": 6}, name="gemma").window_layers == 22
    config.pop("tie_word_embeddings")
    assert shape_of_config(config, name="gemma").tied, "Gemma's configurations leave out that they are"


NEMOTRON_H_8B = "M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-"  # as its config.json has it
NEMOTRON_H = {
    "model_type": "nemotron_h",
    "hidden_size": 4096,
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 21504,
    "vocab_size": 131072,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
}


def test_letters_of_a_pattern_are_layers():
    """A letter is a layer: 24 of Mamba-2, 24 MLPs and 4 of attention in Nemotron-H 8B, arXiv 2504.03624, table 1."""
    found = shape_of_config(NEMOTRON_H | {"hybrid_override_pattern": NEMOTRON_H_8B}, name="nemotron-h-8b")
    assert (found.mamba_layers, found.mlp_count, found.attention_count) == (24, 24, 4)
    known = find_model("nemotron-h-8b")
    assert found.linears() == known.linears()
    one = {
        letter: shape_of_config(NEMOTRON_H | {"hybrid_override_pattern": f"M{letter}"}, name="x") for letter in "M*-"
    }
    mamba = 4096 * (2 * 8192 + 2 * 8 * 128) + 8192 * 4096
    weights = {"M": mamba, "*": 4096 * (4096 + 2 * 1024 + 4096), "-": 2 * 4096 * 21504}
    for letter, shape in one.items():
        assert shape.parameters - 2 * 131072 * 4096 - mamba == weights[letter], letter


def test_windowed_layers_attend_to_their_window():
    shape = shape_of_config(config_of("gpt_oss", {}).to_dict(), name="gpt-oss")
    width = 2 * shape.heads * 2 * shape.query_dim
    assert shape.attention_flops(8192) == width * (18 * 4096 + 18 * 128)


def test_images_have_patches():
    config = ViTConfig(hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=512)
    with torch.device("meta"):
        model = AutoModelForImageClassification.from_config(config)
    blocks = sum(weight.numel() for name, weight in model.named_parameters() if weight.dim() == 2 and "layer" in name)
    shape = shape_of_config({key: value for key, value in config.to_dict().items() if key != "vocab_size"}, name="vit")
    assert (shape.causal, shape.gated) == (False, False)
    assert shape.parameters - 2 * shape.vocab * shape.hidden == blocks
    dit = {"_class_name": "DiTTransformer2DModel", "num_layers": 28, "num_attention_heads": 16}
    dit |= {"attention_head_dim": 72, "patch_size": 2, "out_channels": 8}
    assert shape_of_config(dit, name="DiT-XL/2").parameters / 28 == pytest.approx(12 * 1152**2, rel=0.01)


@pytest.mark.parametrize("kind", ["falcon_h1", "lfm2", "minimax", "recurrent_gemma", "t5", "mamba2"])
def test_a_mixer_that_is_not_read_is_refused(kind):
    with pytest.raises(ConfigError):
        shape_of_config(config_of(kind, {}).to_dict(), name=kind)


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        ("gpt-oss-120b", "gpt_oss", {}),
        ("gpt-oss-20b", "gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}),
        ("gemma-2-2b", "gemma2", {}),
        ("gemma-2-27b", "gemma2", {"num_hidden_layers": 46}),
        ("gemma-3-1b", "gemma3_text", {"num_hidden_layers": 26, "sliding_window": 512}),
        ("gemma-3-27b", "gemma3_text", {"num_hidden_layers": 62, "sliding_window": 1024}),
        ("llama-4-scout", "llama4_text", {"num_hidden_layers": 48}),
    ],
)
def test_a_name_has_the_windows_of_its_configuration(name, kind, settings):
    config = shape_of_config(config_of(kind, settings).to_dict(), name=name)
    known = find_model(name)
    assert (known.window, known.windowed_layers) == (config.window, config.windowed_layers)
    assert known.windowed_layers > 0


LLAMA: dict[str, Any] = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 32000}
LLAMA |= {"intermediate_size": 11008, "model_type": "llama"}
MOE = LLAMA | {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}


@pytest.mark.parametrize(
    ("settings", "dense"),
    [
        ({}, 0),
        ({"decoder_sparse_step": 2}, 16),
        ({"mlp_only_layers": [0, 1, 2]}, 3),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [0, 1]}, 17),
        ({"first_k_dense_replace": 3, "moe_layer_freq": 1}, 3),
        ({"moe_layer_start_index": 1}, 1),
        ({"interleave_moe_layer_step": 2}, 16),
        ({"interleave_moe_layer_step": 1}, 0),
    ],
)
def test_dense_layers_of_a_mixture(settings, dense):
    assert shape_of_config(MOE | settings, name="mixture").dense_layers == dense


@pytest.mark.parametrize("settings", [{"decoder_sparse_step": 2}, {"mlp_only_layers": [1, 3]}])
def test_dense_layers_are_those_that_transformers_builds(settings):
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes |= {"intermediate_size": 160, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    config = config_of("qwen2_moe", sizes | {"shared_expert_intermediate_size": 48, "vocab_size": 100} | settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() > 1)
    shape = shape_of_config(config.to_dict(), name="qwen2-moe")
    gates = 64 * (4 - shape.dense_layers)  # of the shared experts
    assert shape.parameters + gates == matrices


def test_nested_and_renamed_numbers_of_mixtures():
    dbrx = {"model_type": "dbrx", "n_layers": 40, "d_model": 6144, "n_heads": 48, "vocab_size": 100352}
    dbrx |= {"ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}}
    dbrx |= {"attn_config": {"kv_n_heads": 8}}
    assert shape_of_config(dbrx, name="dbrx").parameters == find_model("dbrx-132b").parameters
    ernie = LLAMA | {"model_type": "ernie4_5_moe", "moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536}
    found = shape_of_config(ernie | {"moe_num_shared_experts": 2}, name="ernie")
    assert (found.experts, found.top_k, found.expert_ffn, found.shared_ffn) == (64, 6, 1536, 3072)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"block_configs": [{}]}, "blocks of different shapes"),
        ({"intermediate_size": [11008] * 31 + [4096]}, "differs from layer to layer"),
        ({"num_attention_heads": 5000}, "more than its width"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        shape_of_config(LLAMA | settings, name="odd")
    assert shape_of_config(LLAMA | {"intermediate_size": [11008] * 32}, name="even").ffn == 11008

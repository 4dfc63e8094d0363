"""Causality and gates of model types, against the weights and the outputs of the models that transformers builds."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from octavo.errors import ConfigError
from octavo.planning.model_config import shape_of_config
from octavo.planning.model_shapes import ModelShape, Part
from octavo.planning.model_types import DECODERS, ENCODERS, GATED_DECODERS, GATED_ENCODERS

TEXT_ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "deberta-v2", "modernbert", "eurobert")
IMAGE_ENCODERS = ("vit", "deit", "beit", "dinov2", "dinov3_vit", "data2vec-vision", "siglip_vision_model")
PLAIN = ("gpt2", "gptj", "gpt_neox", "bloom", "codegen", "biogpt", "persimmon", "arcee", "apertus", "nanochat", "phi")
GATED = ("llama", "gemma", "gemma2", "bitnet", "cohere", "olmo2", "stablelm", "phi3", "glm4", "exaone4", "qwen2")
# Refused by their default configurations, or not built of them by transformers.
WITHOUT_DEFAULTS = frozenset(
    {"bamba", "dbrx", "dots1", "hunyuan_v1_dense", "hunyuan_v1_moe", "ministral", "nemotron", "nemotron_h", "zamba"}
)
BUILT = sorted((GATED_DECODERS | DECODERS) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - WITHOUT_DEFAULTS)


def config_of(kind: str, **settings: Any) -> Any:
    build: Any = CONFIG_MAPPING[kind]
    return build(**settings)


def weights_of_blocks(model: torch.nn.Module) -> int:
    named = [(name, weight) for name, weight in model.named_parameters() if weight.dim() == 2]
    return sum(weight.numel() for name, weight in named if "layer" in name and "embed" not in name)


def in_blocks(shape: ModelShape) -> int:
    return sum(linear.parameters for linear in shape.linears() if linear.part != Part.HEAD)


@pytest.mark.parametrize("kind", [*TEXT_ENCODERS, *IMAGE_ENCODERS])
def test_an_encoder_has_the_blocks_that_transformers_builds(kind):
    config = config_of(kind, num_hidden_layers=2)
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    shape = shape_of_config(config.to_dict(), name=kind)
    assert in_blocks(shape) == weights_of_blocks(model)
    assert not shape.causal


def test_a_gate_of_dinov2_is_said_by_its_configuration():
    config = config_of("dinov2", num_hidden_layers=2, hidden_size=1536, num_attention_heads=24, use_swiglu_ffn=True)
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    shape = shape_of_config(config.to_dict(), name="dinov2-giant")
    assert shape.gated
    assert in_blocks(shape) == weights_of_blocks(model)
    assert shape.ffn == 4096


@pytest.mark.parametrize("kind", [*PLAIN, *GATED])
def test_a_decoder_has_the_weights_that_transformers_builds(kind):
    """Embeddings of positions are the only others, which make less than 3 % of the smallest."""
    config = config_of(kind)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() > 1)
    shape = shape_of_config(config.to_dict(), name=kind)
    assert shape.parameters == pytest.approx(matrices, rel=0.03)
    assert shape.gated == (kind in GATED)
    assert shape.causal


TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50}
TINY |= {"num_key_value_heads": 4, "pad_token_id": 0}


def test_hunyuans_shared_expert_counts():
    sizes = {"num_experts": 4, "moe_topk": 2, "head_dim": 8, "tie_word_embeddings": True}
    config = config_of("hunyuan_v1_moe", **TINY, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() > 1)
    assert shape_of_config(config.to_dict(), name="hunyuan").parameters == pytest.approx(matrices, rel=1e-2)


@pytest.mark.parametrize("is_decoder", [False, True])
@pytest.mark.parametrize("kind", ["bert", "roberta", "electra", "modernbert", "eurobert", "llama", "gemma", "olmo2"])
def test_a_causal_model_does_not_see_later_tokens(kind, is_decoder):
    """The first position of a tiny model, with another last token; BERT is causal if it is a decoder."""
    config = config_of(kind, **TINY, is_decoder=is_decoder)
    torch.manual_seed(0)
    model = AutoModel.from_config(config).eval()
    outputs = [model(torch.tensor([[3, 4, 5, last]])).last_hidden_state[0, 0] for last in (6, 7)]
    assert shape_of_config(config.to_dict(), name=kind).causal == torch.equal(*outputs)


@pytest.mark.long
@pytest.mark.parametrize("kind", BUILT)
def test_the_gate_of_a_listed_decoder_is_nearer_to_what_transformers_builds(kind):
    config = config_of(kind)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() > 1)
    shape = shape_of_config(config.to_dict(), name=kind)
    off = {gated: abs(replace(shape, gated=gated).parameters - matrices) for gated in (True, False)}
    assert off[shape.gated] < off[not shape.gated]


def test_no_type_is_in_two_lists():
    lists = (GATED_DECODERS, DECODERS, GATED_ENCODERS, ENCODERS)
    assert len(frozenset.union(*lists)) == sum(map(len, lists))


NUMBERS = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
CAUSAL = {"architectures": ["NewForCausalLM"]}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"model_type": "ditto"},
        {"model_type": "albert", "hidden_act": "gelu_new", "architectures": ["AlbertForMaskedLM"]},
        {"model_type": "bertweet", "hidden_act": "silu"},
        {"model_type": "new", "hidden_act": "silu", "architectures": ["NewForMaskedLM"]},
        {"model_type": "new", **CAUSAL},
        {"model_type": "new", "hidden_act": "relu2", **CAUSAL},
        {"model_type": "new", "hidden_act": "silu", "is_decoder": False},
        {"model_type": "new", "hidden_act": "silu", "architectures": "\0", "is_decoder": 1},
    ],
)
def test_a_type_that_is_not_known_and_not_said_is_refused_in_a_sentence(settings):
    kind = settings.get("model_type", "none")
    with pytest.raises(
        ConfigError, match=f"^the model type of 'x', {kind}, is not known, and its configuration does no"
    ):
        shape_of_config(NUMBERS | settings, name="x")


@pytest.mark.parametrize(
    "settings",
    [
        {"hidden_act": "silu", **CAUSAL},
        {"hidden_activation": "swiglu", **CAUSAL},
        {"activation_function": "SiLU", "is_decoder": True},
        {"hidden_act": "silu", "architectures": ["QWenLMHeadModel"]},
    ],
)
def test_a_new_type_that_says_that_it_is_a_gated_decoder_is_read(settings):
    shape = shape_of_config(NUMBERS | settings | {"model_type": "new"}, name="x")
    assert (shape.causal, shape.gated) == (True, True)


def test_the_decoder_of_a_model_with_images_is_read_by_the_architecture_around_it():
    inner = NUMBERS | {"model_type": "new_text", "hidden_act": "silu"}
    outer = {"model_type": "new", "text_config": inner, "architectures": ["NewForConditionalGeneration"]}
    assert shape_of_config(outer, name="x").causal
    with pytest.raises(ConfigError, match="new_text, is not known"):
        shape_of_config(outer | {"architectures": ["NewModel"]}, name="x")

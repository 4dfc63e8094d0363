"""Mixtures of experts under engines: every expert is quantized, whoever brings the model, or the engine refuses."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from octavo.convert import unfuse_experts
from octavo.engines import agree, attribute, convert_as_served, get, input_amaxes, model_as
from octavo.engines.model import EngineLinear
from octavo.engines.summary import layer_cells, record, worst_first
from octavo.errors import ConfigError
from octavo.models import Llama
from octavo.nn import Linear
from octavo.rl import log_probs
from tests.tiny_llama import tiny_llama_config

LAYERS, EXPERTS, ATTENTION, EXPERT = 2, 4, 4, 3  # layers; in each: experts, linear layers of attention and of an expert
TOKENS = torch.randint(40, (2, 15), generator=torch.Generator().manual_seed(0))


def scaled(model: nn.Module) -> nn.Module:
    """Weights large enough that engines differ."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
    return model.eval()


def mixtral() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": EXPERTS}
    config = transformers.MixtralConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        max_position_embeddings=16,
        **sizes,
    )
    return scaled(transformers.MixtralForCausalLM(config))


def own() -> nn.Module:
    return scaled(Llama(tiny_llama_config(num_experts=EXPERTS, experts_per_token=2), seed=3))


def unfused(model: Any) -> Any:
    copied = copy.deepcopy(model)
    assert unfuse_experts(copied) == {}
    return copied


MODELS = pytest.mark.parametrize("build", [mixtral, own])


@pytest.mark.parametrize("name", ["vllm-token", "te-block", "vllm-tensor"])
def test_fused_experts_are_quantized_as_unfused_ones(name):
    model, profile = mixtral(), get(name)
    names = [path for path, _ in model.named_modules()]
    amaxes = input_amaxes(model, TOKENS)
    engine = model_as(model, profile, input_amaxes=amaxes)
    assert len(engine.layers) == LAYERS * (ATTENTION + EXPERTS * EXPERT)
    plain = unfused(model)
    expected = model_as(plain, profile, input_amaxes=input_amaxes(plain, TOKENS))
    assert torch.equal(engine(TOKENS), expected(TOKENS))
    assert [path for path, _ in model.named_modules()] == names
    if name == "vllm-token":
        assert torch.equal(log_probs(model, TOKENS, profile=name), log_probs(plain, TOKENS, profile=name))


@MODELS
def test_two_engines_that_route_other_tokens_are_compared(build):
    model = build()
    found = agree(model, "te-block", "vllm-block", TOKENS, max_kl=1e-9)
    by_path = {layer.path: layer for layer in found.layers}
    experts = {path: layer for path, layer in by_path.items() if ".experts." in path}
    assert len(experts) == LAYERS * EXPERTS * EXPERT
    assert len(by_path) == len(experts) + LAYERS * ATTENTION
    for path, layer in by_path.items():
        assert layer.weight is not None
        assert len(layer.end_to_end) == (0 if path in experts else len(TOKENS))
        assert (layer.mean_end_to_end is None) == (path in experts)
    assert max(layer.error.estimate for layer in experts.values() if layer.errors) > 0
    assert found.kl.estimate > 0
    assert {layer_cells(layer)[-1] for layer in experts.values()} == {"–"}
    assert any(effect.layer_error > 0 for effect in attribute(model, found, TOKENS[:1]).effects)


def test_an_expert_without_tokens_is_shown_last():
    model = own()
    found = agree(model, "te-block", "vllm-block", TOKENS[:1, :2])
    unused = [layer for layer in found.layers if not layer.errors]
    assert unused
    assert all(layer.input is None for layer in unused)
    assert {*worst_first(found)[-len(unused) :]} == {*unused}
    assert layer_cells(unused[0])[-2:] == ["–", "–"]
    assert {len(layer["end_to_end"]) for layer in record(found, {})["layers"]} == {0, 1}


def test_an_expert_without_a_scale_is_named():
    model = own()
    with pytest.raises(ConfigError, match=r"experts\.\d\.\w+ has no scale; give input_amaxes"):
        model_as(model, get("vllm-tensor"), input_amaxes=input_amaxes(model, TOKENS[:1, :1]))


def test_training_refuses_fused_experts_and_casts_unfused_ones():
    fused, profile = mixtral(), get("vllm-token")
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.experts, .* octavo\.convert\.unfuse_experts"):
        convert_as_served(fused, profile)
    assert not any(isinstance(module, EngineLinear) for module in fused.modules())
    model = unfused(fused)
    served = model_as(fused, profile)(TOKENS)
    context = convert_as_served(model, profile)
    quantized = set(model_as(fused, profile).layers)
    casts = {path for path, layer in model.named_modules() if isinstance(layer, Linear) and layer.recipe.output.b}
    assert casts == quantized
    with context:
        logits = model(TOKENS).logits
    assert torch.equal(logits.detach(), served)
    logits.float().logsumexp(-1).mean().backward()
    assert all(model.get_submodule(path).weight.grad is not None for path in quantized if "attn" in path)


def test_experts_that_cannot_be_unfused_are_refused(monkeypatch):
    model = mixtral()
    monkeypatch.setattr("octavo.engines.model.unfuse_experts", lambda model: {})
    with pytest.raises(ConfigError, match="vllm-token is computed of linear layers"):
        model_as(model, get("vllm-token"))
    with pytest.raises(ConfigError, match="vllm-token is computed of linear layers"):
        agree(model, "vllm-token", "te-block", TOKENS)
    skipped = replace(get("vllm-token"), skipped=("*.experts",))
    assert len(model_as(model, skipped).layers) == LAYERS * ATTENTION

"""Training with keys and values that have been through a server's FP8 cache."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from octavo.engines import FP8_CACHE, EngineProfile, convert_as_served, get, model_as
from octavo.errors import ConfigError
from octavo.models import Llama
from octavo.models.served_forward import served_forward
from octavo.numerics import EngineCast, PerRow
from tests.tiny_llama import tiny_llama_config

IDS = torch.randint(60, (2, 24), generator=torch.Generator().manual_seed(2))
CACHED = get("vllm-token+fp8-cache")
BY_HEAD = replace(get("sglang-block"), kv_cache=EngineCast(granularity=PerRow()))
each_cache = pytest.mark.parametrize("profile", [CACHED, BY_HEAD], ids=["one scale", "a scale a head"])


def our_decoder() -> nn.Module:
    return _with_large_weights(Llama(tiny_llama_config(hidden_size=128, intermediate_size=192, num_layers=2), seed=3))


def decoder_of_transformers() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: no model of its own")
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return _with_large_weights(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)))


def _with_large_weights(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5)
    return model


def logits_of(model: nn.Module, tokens: torch.Tensor = IDS) -> torch.Tensor:
    found = model(tokens)
    logits: torch.Tensor = found if isinstance(found, torch.Tensor) else found.logits
    return logits


def served(model: nn.Module, profile: EngineProfile) -> torch.Tensor:
    logits: torch.Tensor = model_as(model.eval(), profile)(IDS)
    return logits


@each_cache
@pytest.mark.parametrize("make", [our_decoder, decoder_of_transformers])
def test_logits_in_training_are_those_of_the_engine(make, profile):
    model = make()
    expected = served(model, profile)
    assert not torch.equal(expected, served(model, replace(profile, kv_cache=None)))
    wrapped = nn.DataParallel(model)  # on a machine without GPUs it calls the module
    context = convert_as_served(wrapped, profile)
    for _ in range(2):
        with context:
            assert torch.equal(logits_of(model.train()), expected)
    with served_forward(model, replace(profile, kv_cache=None)):
        assert not torch.equal(logits_of(model), expected)


@pytest.mark.parametrize("make", [our_decoder, decoder_of_transformers])
def test_gradients_pass_straight_through(make):
    """Keys and values that a cache keeps exactly, here zeros, have the gradients of no cache."""
    grads = []
    for cast in (None, FP8_CACHE):
        model = make()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("k_proj.weight", "v_proj.weight")):
                    parameter.zero_()
        with convert_as_served(model, replace(get("vllm-token"), kv_cache=cast)):
            logits_of(model.train()).float().logsumexp(-1).sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    plain, cached = grads
    assert plain.keys() == cached.keys()
    assert all(torch.equal(plain[name], cached[name]) for name in plain)
    assert all(grad.any() for name, grad in cached.items() if name.endswith("v_proj.weight"))


def test_activation_checkpointing_repeats_the_casts():
    grads = []
    for repeats in (False, True):
        model = our_decoder()
        layer = model.get_submodule("model.layers.0")
        forward = layer.forward
        if repeats:
            layer.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)
        with convert_as_served(model, CACHED):
            logits_of(model.train()).float().logsumexp(-1).sum().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


def test_what_cannot_be_cast_is_refused():
    model = decoder_of_transformers()
    with served_forward(model, CACHED), pytest.raises(ConfigError, match="call the model without one"):
        model(IDS, past_key_values=object())
    model.activation_checkpointing_enable()
    with served_forward(model.train(), CACHED), pytest.raises(ConfigError, match="turn gradient checkpointing off"):
        model(IDS)
    with pytest.raises(ConfigError, match="vllm-token\\+fp8-cache casts keys and values, and octavo knows where"):
        served_forward(nn.Sequential(nn.Linear(4, 4)), CACHED)


def test_the_hooks_are_gone_after_an_error():
    model = our_decoder().eval()
    with torch.no_grad():
        plain = logits_of(model)
        for cause in (nullcontext(), pytest.raises(ValueError, match="stop")):
            with cause, served_forward(model, CACHED):
                if not isinstance(cause, nullcontext):
                    raise ValueError("stop")
            assert torch.equal(logits_of(model), plain)


def test_names_with_a_cache():
    assert (
        replace(
            get("vllm-token"),
            name=CACHED.name,
            engine="vLLM, per token, compiled, cache in FP8",
            kv_cache=CACHED.kv_cache,
        )
        == CACHED
    )
    with pytest.raises(
        ConfigError, match=r"'vllm-tokn\+fp8-cache' \(did you mean 'vllm-token'\?\); use .*each also with"
    ):
        get("vllm-tokn+fp8-cache")
    with pytest.raises(ConfigError, match="there is no engine 'vllm-token\\+cache'"):
        get("vllm-token+cache")

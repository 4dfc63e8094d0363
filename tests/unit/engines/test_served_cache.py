"""Training with keys and values that have been through a server's FP8 cache."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from octavo.engines import FP8_CACHE, EngineProfile, convert_as_served, get, model_as
from octavo.errors import ConfigError
from octavo.models import Llama
from octavo.models.served_forward import cast_of_cache, served_forward
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


def test_gradients_pass_straight_through():
    keys, values, *grads = torch.randn(4, 2, 3, 2, 8, generator=torch.Generator().manual_seed(0))
    both = keys.requires_grad_(), values.requires_grad_()
    cached = cast_of_cache(FP8_CACHE)(0, *both)
    for x, through, grad in zip(both, cached, grads, strict=True):
        assert torch.equal(through, x.to(torch.float8_e4m3fn).float())
        through.backward(grad)
        assert torch.equal(x.grad, grad)


@pytest.mark.parametrize("make", [our_decoder, decoder_of_transformers])
def test_projections_of_keys_and_values_learn(make):
    model = make()
    with convert_as_served(model, CACHED):
        logits_of(model.train()).float().logsumexp(-1).sum().backward()
    grads = [p.grad for name, p in model.named_parameters() if "k_proj" in name or "v_proj" in name]
    assert len(grads) == 4
    assert all(grad is not None and grad.isfinite().all() and grad.any() for grad in grads)


def test_activation_checkpointing_repeats_the_casts():
    grads = []
    for repeats in (False, True):
        model = our_decoder()
        layer: Any = model.get_submodule("model.layers.0")
        forward = layer.forward
        if repeats:
            layer.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)
        with convert_as_served(model, CACHED):
            logits_of(model.train()).float().logsumexp(-1).sum().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


def test_what_cannot_be_cast_is_refused():
    model: Any = decoder_of_transformers()
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
    plain = get("vllm-token")
    assert CACHED.engine == f"{plain.engine}, cache in FP8"
    assert replace(plain, name=CACHED.name, engine=CACHED.engine, kv_cache=FP8_CACHE) == CACHED
    with pytest.raises(
        ConfigError, match=r"'vllm-tokn\+fp8-cache' \(did you mean 'vllm-token'\?\); use .*each also with"
    ):
        get("vllm-tokn+fp8-cache")
    with pytest.raises(ConfigError, match="there is no engine 'vllm-token\\+cache'"):
        get("vllm-token+cache")

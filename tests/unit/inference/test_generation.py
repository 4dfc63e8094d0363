"""Tokens one by one from a runner are what the whole text, read at once, says should follow."""

from typing import Any

import pytest
import torch

from octavo.errors import ConfigError
from octavo.inference import ModelRunner, generate
from octavo.kernels import native_bindings
from octavo.models import Llama
from tests.tiny_llama import tiny_llama_config


@pytest.fixture(scope="module")
def runner():
    config = tiny_llama_config(vocab_size=100, hidden_size=48, intermediate_size=96, max_positions=80)
    return ModelRunner(Llama(config, seed=3))


def test_greedy_tokens_match_argmax(runner):
    prompt = [5, 17, 3]
    new = list(generate(runner, prompt, max_new_tokens=20, temperature=0))
    logits = runner(torch.tensor(prompt + new), runner.new_cache(), every=True)
    assert new == logits[2:-1].argmax(dim=-1).tolist()


def test_sampling_depends_only_on_the_generator(runner):
    def sampled(seed):
        generator = torch.Generator().manual_seed(seed)
        return list(generate(runner, [1], max_new_tokens=30, temperature=2.0, generator=generator))

    assert sampled(7) == sampled(7)
    assert sampled(7) != sampled(8)


def test_generation_ends_at_stop_id_or_limit(runner):
    greedy: dict[str, Any] = {"temperature": 0.0}
    all_of_it = list(generate(runner, [9], max_new_tokens=12, **greedy))
    stop = all_of_it[7]
    assert list(generate(runner, [9], max_new_tokens=12, stop_id=stop, **greedy)) == all_of_it[: all_of_it.index(stop)]
    assert list(generate(runner, [9], max_new_tokens=0, **greedy)) == []
    assert len(list(generate(runner, [9] * 78, max_new_tokens=99, **greedy))) == 3
    assert len(list(generate(runner, [9] * 80, max_new_tokens=99, **greedy))) == 1


@pytest.mark.parametrize(
    ("prompt", "options", "text"),
    [
        ([], {}, "prompt is empty"),
        ([1] * 81, {}, "81 tokens, but this model has 80 positions"),
        ([100], {}, "from 0 to 99, not 100"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"top_k": 0}, "top_k"),
        ([1], {"max_new_tokens": -1}, "max_new_tokens"),
        ([1], {"context": 8}, "context only applies to a module without a cache"),
        ([1], {"max_new_tokens": 2.5}, "max_new_tokens must be a whole number of at least 0, not 2.5"),
    ],
)
def test_bad_requests_are_named(runner, prompt, options, text):
    request: dict[str, Any] = {"max_new_tokens": 2} | options
    with pytest.raises(ConfigError, match=text):
        list(generate(runner, prompt, **request))


def test_a_prompt_that_is_no_list_is_named(runner):
    prompt: Any = torch.tensor([1, 2])
    with pytest.raises(TypeError, match="a list of token ids, not Tensor"):
        next(generate(runner, prompt, max_new_tokens=2))


@pytest.mark.parametrize("level", ["torch", *native_bindings.levels()])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_with_nan_weights_is_named(runner, level, temperature):
    broken = Llama(runner.config)
    broken.state_dict()["model.layers.0.mlp.down_proj.weight"][3, 5] = torch.nan
    with pytest.raises(ConfigError, match="largest logit is nan, so no token can be sampled"):
        next(generate(ModelRunner(broken, level=level), [1], max_new_tokens=2, temperature=temperature))

"""Several sequences in one step are what each of them is alone, and a step that is refused leaves all as they were."""

from typing import Any

import pytest
import torch

from octavo.errors import BackendError, ConfigError
from octavo.formats import FP32
from octavo.inference import KVCacheBatch, ModelRunner, PagedKVCache
from octavo.kernels import native_bindings
from octavo.models import Llama
from tests.tiny_llama import tiny_llama_config

LEVELS = ("torch", *native_bindings.levels())


@pytest.fixture(scope="module")
def model():
    config = tiny_llama_config(vocab_size=60, hidden_size=48, intermediate_size=96, max_positions=100)
    return Llama(config, seed=3)


@pytest.mark.parametrize("level", LEVELS)
def test_step_matches_each_sequence_alone(model, level):
    runner, prompts = ModelRunner(model, level=level), ([1, 2, 3], [4], list(range(40)))
    batch, alone = runner.new_batch(3, fmt=FP32), [runner.new_cache(fmt=FP32) for _ in prompts]
    for prompt, sequence, cache in zip(prompts, batch.sequences, alone, strict=True):
        torch.testing.assert_close(runner(torch.tensor(prompt), sequence), runner(torch.tensor(prompt), cache))
    for tokens in torch.randint(0, 60, (30, 3)):
        wanted = torch.stack([runner(token[None], cache) for token, cache in zip(tokens, alone, strict=True)])
        torch.testing.assert_close(runner.step(tokens, batch), wanted, rtol=1e-4, atol=1e-4)
    assert batch.lengths == [33, 31, 70]


def test_a_batch_has_the_bytes_of_its_caches():
    batch = KVCacheBatch(2, 3, 16, sequences=5, max_positions=130)
    assert sum(t.nbytes for t in (batch.tensors.keys, batch.tensors.values)) == 2 * 5 * 2 * 192 * 3 * 16
    alone = PagedKVCache(2, 3, 16, max_positions=130)
    assert [(cache.capacity, cache.nbytes) for cache in batch.sequences] == [(192, alone.nbytes)] * 5
    t = batch.tensors
    assert 5 * alone.nbytes == sum(x.nbytes for x in (t.keys, t.values, t.key_scale, t.value_scale) if x is not None)
    owners = [cache.tensors.keys.data_ptr() for cache in batch.sequences]
    assert set(owners) == {batch.tensors.keys.data_ptr()}
    batch.sequences[3].advance(7)
    batch.advance()
    assert batch.lengths == [1, 1, 1, 8, 1]
    assert PagedKVCache(2, 3, 16, max_positions=130).length == 0
    with pytest.raises(ConfigError, match="sequences"):
        KVCacheBatch(2, 3, 16, sequences=0, max_positions=130)


def test_bad_input_raises_and_keeps_the_batch(model):
    runner = ModelRunner(model)
    batch = runner.new_batch(2, max_positions=64)
    runner(torch.arange(50), batch.sequences[0])
    runner(torch.arange(59), batch.sequences[1])
    for _ in range(5):
        runner.step(torch.tensor([1, 2]), batch)
    refused: list[tuple[Any, type[Exception], str]] = [
        (torch.tensor([1, 2, 3]), ConfigError, "each of 2 sequences"),
        (torch.arange(5000), ConfigError, r"each of 2 sequences, not \(5000,\) tokens$"),
        (torch.tensor([[1], [2]]), ConfigError, r"each of 2 sequences, not \(2, 1\) tokens"),
        ([1, 2], TypeError, "a tensor of integers, not list"),
        (torch.tensor([1.0, 2.0, 3.0]), TypeError, r"a tensor of integers, not torch\.float32"),
        (torch.tensor([1, 60]), ConfigError, "from 0 to 59, not 60 to 60"),
        (torch.tensor([1, 2], device="meta"), BackendError, "takes tokens on a CPU, not on meta"),
        (torch.tensor([1, 2]), ConfigError, "room for 64 positions, and 65"),
    ]
    for tokens, error, text in refused:
        with pytest.raises(error, match=text):
            runner.step(tokens, batch)
    assert batch.lengths == [55, 64]
    with pytest.raises(BackendError, match="new_cache"):
        runner.step(torch.tensor([1]), KVCacheBatch(3, 2, 12, sequences=1, max_positions=64))
    cache: Any = batch.sequences[0]
    with pytest.raises(TypeError, match=r"from new_batch\(\), not a PagedKVCache"):
        runner.step(torch.tensor([1]), cache)

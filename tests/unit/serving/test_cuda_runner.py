"""A runner on a GPU against the definition on the CPU, with a model large enough to fill a page table."""

import pytest
import torch

from octavo.errors import BackendError, ConfigError
from octavo.models import Llama, LlamaConfig
from octavo.serving import ModelRunner, generate

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model():
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1408,
        num_layers=4,
        num_heads=8,
        num_kv_heads=2,
        max_positions=3000,
    )
    made = Llama(config, seed=2)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.mul_(2.0)
    return made


@pytest.fixture(scope="module")
def runners(model):
    return ModelRunner(model, level="torch"), ModelRunner(model.cuda())


def error(found, wanted):
    return float((found.cpu() - wanted).square().mean().sqrt() / wanted.std())


def test_prompt_and_tokens_are_those_of_the_cpu(runners):
    on_cpu, on_gpu = runners
    tokens, caches = torch.randint(0, 1000, (620,)), [runner.new_cache() for runner in runners]
    assert error(on_gpu(tokens[:600], caches[1], every=True), on_cpu(tokens[:600], caches[0], every=True)) < 0.08
    for token in tokens[600:]:
        assert error(on_gpu(token[None], caches[1]), on_cpu(token[None], caches[0])) < 0.08
    assert [cache.length for cache in caches] == [620, 620]


def test_the_definition_runs_on_a_gpu_too(model, runners):
    by_torch = ModelRunner(model.cuda(), level="torch")
    tokens = torch.randint(0, 1000, (20,))
    wanted = runners[0](tokens, runners[0].new_cache(100), every=True)
    assert error(by_torch(tokens, by_torch.new_cache(100), every=True), wanted) < 0.02


def test_sixteen_sequences_of_different_lengths(runners):
    on_cpu, on_gpu = runners
    batches = [runner.new_batch(16, 400) for runner in runners]
    prompts = [torch.randint(0, 1000, (length,)) for length in range(1, 321, 20)]
    for runner, batch in zip(runners, batches, strict=True):
        for prompt, sequence in zip(prompts, batch.sequences, strict=True):
            runner(prompt, sequence)
    for _ in range(5):
        tokens = torch.randint(0, 1000, (16,))
        assert error(on_gpu.step(tokens.cuda(), batches[1]), on_cpu.step(tokens, batches[0])) < 0.08
    assert batches[0].lengths == batches[1].lengths == [len(prompt) + 5 for prompt in prompts]


def test_long_contexts_end_where_there_is_no_more_room(runners):
    on_gpu = runners[1]
    cache = on_gpu.new_cache()
    logits = on_gpu(torch.randint(0, 1000, (2990,)), cache)
    for _ in range(10):
        logits = on_gpu(logits.argmax()[None], cache)
    with pytest.raises(ConfigError, match="3000 positions"):
        on_gpu(torch.tensor([1]), cache)


def test_generation_takes_what_follows(runners):
    on_gpu, prompt = runners[1], [5, 17, 3]
    new = list(generate(on_gpu, prompt, max_new_tokens=30, temperature=0))
    assert new == list(generate(on_gpu, prompt, max_new_tokens=30, temperature=0))
    assert len(new) == 30
    sampled = [
        list(generate(on_gpu, prompt, max_new_tokens=30, generator=torch.Generator().manual_seed(seed)))
        for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]


def test_levels_are_a_cpus(model):
    with pytest.raises(BackendError, match="levels are those of a CPU"):
        ModelRunner(model.cuda(), level="avx2")

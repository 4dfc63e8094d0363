"""The runner against octavo's own model with the same codes decoded, and against torch's operations over the cache."""

import pytest
import torch

import octavo
from octavo.errors import BackendError, ConfigError
from octavo.formats import BF16, E4M3, FP32
from octavo.kernels import cpu
from octavo.models import Llama, LlamaConfig
from octavo.serving import ModelRunner

LEVELS = ("torch", *cpu.levels())


def model(*, tie=True, heads=6, kv_heads=2):
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=72,
        intermediate_size=200,
        num_layers=3,
        num_heads=heads,
        num_kv_heads=kv_heads,
        max_positions=256,
        tie_embeddings=tie,
    )
    made = Llama(config, seed=1)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3.0)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return made


@torch.no_grad()
def with_decoded_weights(made):
    """The same model, every weight of a linear (and a tied embedding) replaced by what its codes decode to."""
    for module in made.modules():
        if isinstance(module, torch.nn.Linear):
            codes = octavo.quantize(module.weight, E4M3, granularity=octavo.PerRow())
            module.weight.copy_(codes.dequantize())
    return made


@torch.no_grad()
def with_decoded_head(made):
    """Where the head was not converted, its weight is what the runner casts."""
    codes = octavo.quantize(made.lm_head.weight, E4M3, granularity=octavo.PerRow())
    made.lm_head.weight = torch.nn.Parameter(codes.dequantize(), requires_grad=False)
    return made


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (9, 1)])
def test_logits_are_those_of_the_model(level, tie, heads, kv_heads):
    made = model(tie=tie, heads=heads, kv_heads=kv_heads)
    runner = ModelRunner(made, level=level)
    tokens = torch.randint(0, 300, (100,))
    with torch.no_grad():
        wanted = with_decoded_weights(made)(tokens[None])[0]
    cache = runner.new_cache(fmt=FP32)
    found = torch.cat(
        [
            runner(tokens[:70], cache, every=True),
            runner(tokens[70:75], cache, every=True),
            *(runner(token[None], cache)[None] for token in tokens[75:]),
        ]
    )
    assert cache.length == 100
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("level", cpu.levels())
@pytest.mark.parametrize("fmt", [E4M3, BF16], ids=str)
def test_native_layers_follow_their_definition(level, fmt):
    made = model()
    tokens = torch.randint(0, 300, (150,))
    logits = []
    for name in ("torch", level):
        runner = ModelRunner(made, level=name)
        cache = runner.new_cache(fmt=fmt)
        logits.append(torch.cat([runner(part, cache, every=True) for part in tokens.split([130, 1, 1, 18])]))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-3, atol=1e-3)  # a key may fall to the other side of a tie


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_forgotten_has_no_trace(level):
    runner, tokens = ModelRunner(model(), level=level), torch.randint(0, 300, (80,))
    cache = runner.new_cache()
    first = runner(tokens, cache)
    cache.length = 60
    runner(tokens[:7], cache)
    cache.length = 0
    assert torch.equal(runner(tokens, cache), first)


def test_bytes_count_every_weight_once():
    made = model()
    rows = {name: p.shape for name, p in made.named_parameters() if p.ndim == 2}
    assert ModelRunner(made).weight_bytes == sum(n * k + 4 * n for n, k in rows.values())


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_codes_that_are_held_are_read_as_they_are(recipe):
    made, tokens = model(tie=False), torch.arange(20)
    made.requires_grad_(False)
    octavo.convert(made, recipe=recipe, frozen="fp8")
    runner = ModelRunner(made)
    found = runner(tokens, runner.new_cache(fmt=FP32), every=True)
    octavo.restore(made)
    torch.testing.assert_close(found, with_decoded_head(made)(tokens[None])[0], rtol=1e-4, atol=1e-4)


def test_codes_in_blocks_are_refused():
    made = model(tie=False).requires_grad_(False)
    octavo.convert(made, recipe="blockwise", frozen="fp8")
    with pytest.raises(ConfigError, match=r"octavo\.restore"):
        ModelRunner(made)


def test_bad_input_is_refused_and_the_cache_stays():
    runner = ModelRunner(model())
    cache = runner.new_cache(max_positions=64)
    runner(torch.arange(60), cache)
    for tokens, text in (
        (torch.zeros(0, dtype=torch.int64), "one sequence"),
        (torch.zeros(1, 2, dtype=torch.int64), "one sequence"),
        (torch.tensor([300]), "below the vocabulary's 300"),
        (torch.tensor([-1]), "below the vocabulary's 300"),
        (torch.arange(5), "room for 64 positions, and 65 are needed"),
    ):
        with pytest.raises(ConfigError, match=text):
            runner(tokens, cache)
    with pytest.raises(TypeError, match="integers"):
        runner(torch.ones(3), cache)
    assert cache.length == 60
    large = runner.new_cache(max_positions=1000)
    with pytest.raises(ConfigError, match="knows 256 positions, and 257"):
        runner(torch.zeros(257, dtype=torch.int64), large)
    with pytest.raises(BackendError, match="no level"):
        ModelRunner(model(), level="abacus")
    with pytest.raises(ConfigError, match="on a CPU"):
        ModelRunner(model().to("meta"))

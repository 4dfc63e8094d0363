"""The runner against octavo's own model with the same codes decoded, and against torch's operations over the cache."""

from typing import Any

import pytest
import torch

import octavo
from octavo.errors import BackendError, ConfigError
from octavo.formats import BF16, E4M3, FP32
from octavo.inference import ModelRunner, PagedKVCache
from octavo.inference.native_decoder import CacheTensors, NativeDecoder
from octavo.kernels import native_bindings
from octavo.models import Llama
from tests.tiny_llama import tiny_llama_config

LEVELS = ("torch", *native_bindings.levels())


def model(*, tie=True, heads=6, kv_heads=2):
    config = tiny_llama_config(
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


def means(made):
    """Of keys, as large as they are."""
    shape, generator = (made.config.num_kv_heads, made.config.head_dim), torch.Generator().manual_seed(5)
    return {layer: 2 * torch.randn(shape, generator=generator) for layer in range(made.config.num_layers)}


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
def test_logits_match_model(level, tie, heads, kv_heads):
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


@pytest.mark.parametrize("level", native_bindings.levels())
@pytest.mark.parametrize("fmt", [E4M3, BF16], ids=str)
def test_native_kernels_match_reference(level, fmt):
    made = model()
    tokens = torch.randint(0, 300, (150,))
    logits = []
    for name in ("torch", level):
        runner = ModelRunner(made, level=name)
        cache = runner.new_cache(fmt=fmt)
        logits.append(torch.cat([runner(part, cache, every=True) for part in tokens.split([130, 1, 1, 18])]))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-3, atol=1e-3)  # a key may fall to the other side of a tie


@pytest.mark.parametrize("level", LEVELS)
def test_discarded_positions_have_no_effect(level):
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
def test_stored_codes_are_not_quantized_again(recipe):
    made, tokens = model(tie=False), torch.arange(20)
    made.requires_grad_(False)
    octavo.convert(made, recipe=recipe, frozen="fp8")
    runner = ModelRunner(made)
    found = runner(tokens, runner.new_cache(fmt=FP32), every=True)
    octavo.restore(made)
    torch.testing.assert_close(found, with_decoded_head(made)(tokens[None])[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("path", "inputs", "outputs"),
    [("mlp.down_proj", 64, 32000), ("mlp.gate_proj", 72, 8), ("self_attn.o_proj", 72, 71), ("mlp.up_proj", 71, 200)],
)
def test_layers_of_another_shape_are_refused(path, inputs, outputs):
    made = model()
    made.model.layers[1].set_submodule(path, torch.nn.Linear(inputs, outputs, bias=False))
    with pytest.raises((BackendError, ConfigError), match=r"a decoder of this shape has|share an input"):
        ModelRunner(made)


@pytest.mark.parametrize("level", ["torch", *native_bindings.levels()])
@pytest.mark.parametrize(("recipe", "served"), [("blockwise", "fp8"), ("blockwise", "fp8-dynamic"), ("mxfp8", "fp8")])
def test_codes_in_blocks_are_read_with_their_scales(level, recipe, served):
    """Of the model's own forward on decoded weights, or with inputs cast as in training."""
    made, tokens = model(tie=False).requires_grad_(False), torch.arange(20)
    options = {"power_of_two": False} if served == "fp8-dynamic" else {}  # as the engine scales inputs
    octavo.convert(made, recipe=octavo.recipes.get(recipe, **options), frozen="fp8")
    runner = ModelRunner(made, recipe=served, level=level)
    found = runner(tokens, runner.new_cache(fmt=FP32), every=True)
    if served == "fp8":
        octavo.restore(made)
        wanted = with_decoded_head(made)(tokens[None])[0]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    else:
        assert octavo.numerics.sqnr_db(with_decoded_head(made)(tokens[None])[0], found) > 35


@pytest.mark.parametrize("level", ["torch", *native_bindings.levels()])
def test_codes_in_rows_and_in_blocks_share_an_input(level):
    made, tokens = model(tie=False).requires_grad_(False), torch.arange(20)
    octavo.convert(made, recipe="blockwise", frozen="fp8", overrides={"*.k_proj": "rowwise", "*.up_proj": "tensorwise"})
    runner = ModelRunner(made, level=level)
    found = runner(tokens, runner.new_cache(fmt=FP32), every=True)
    octavo.restore(made)
    torch.testing.assert_close(found, with_decoded_head(made)(tokens[None])[0], rtol=1e-4, atol=1e-4)


def test_blocks_with_static_inputs_are_refused():
    made = model(tie=False).requires_grad_(False)
    octavo.convert(made, recipe=octavo.recipes.get("static", weight_granularity="128x128"), frozen="fp8")
    for layer in made.modules():
        if isinstance(layer, octavo.nn.Linear):
            layer.input_scale.fill_(0.01)
    with pytest.raises(ConfigError, match="weights in blocks with static inputs; serve this model as fp8"):
        ModelRunner(made, recipe="fp8-static")


def test_blocks_of_two_widths_that_share_an_input_are_refused():
    made = model(tie=False).requires_grad_(False)
    octavo.convert(made, recipe="blockwise", frozen="fp8", overrides={"*.k_proj": "mxfp8"})
    with pytest.raises(ConfigError, match=r"blocks of one width, not \[32, 128\]"):
        ModelRunner(made)


@pytest.mark.parametrize("level", native_bindings.levels())
def test_first_layer_codes_match_reference(level):
    """Keys of layer 0 differ by the order of sums alone; those that are all zero, and their scales, not at all."""
    made, tokens = model(), torch.randint(0, 300, (70,))
    made.model.layers[0].self_attn.v_proj.weight.data[:4] *= 1e-30
    made.model.layers[1].self_attn.k_proj.weight.data.zero_()
    caches = []
    for name in ("torch", level):
        runner = ModelRunner(made, level=name)
        caches.append(runner.new_cache())
        runner(tokens, caches[-1])
    wanted, found = (cache.tensors for cache in caches)
    for name in ("keys", "values", "key_scale", "value_scale"):
        one, other = (getattr(tensors, name)[0].view(torch.uint8) for tensors in (wanted, found))
        assert (one != other).float().mean() < 1e-3
    for name in ("keys", "key_scale"):
        one, other = (getattr(tensors, name)[1].view(torch.uint8) for tensors in (wanted, found))
        assert torch.equal(one, other)
    assert not bool(found.keys[1].float().any())


@pytest.mark.parametrize("level", native_bindings.levels())
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (9, 1)])
def test_cache_bits_match_reference_at_every_level(level, heads, kv_heads):
    """Of the keys and values that it makes itself, which an FP32 cache shows, in the first layer."""
    made, tokens = model(heads=heads, kv_heads=kv_heads), torch.randint(0, 300, (100,))
    attention = made.model.layers[0].self_attn
    attention.k_proj.weight.data[1] *= 20
    attention.v_proj.weight.data[:9] *= 1e-30
    runner = ModelRunner(made, level=level, key_means=means(made))
    numbers, found = runner.new_cache(fmt=FP32), runner.new_cache()
    for cache in (numbers, found):
        for part in tokens.split([97, 1, 2]):
            runner(part, cache)
    wanted = runner.new_cache()
    wanted.store(0, torch.arange(100), *numbers.read(0, 100))
    for name in ("keys", "values", "key_scale", "value_scale"):
        one, other = (getattr(cache.tensors, name)[0].view(torch.uint8) for cache in (wanted, found))
        assert torch.equal(one, other), name


@pytest.mark.parametrize("level", LEVELS)
def test_key_means_do_not_change_logits(level):
    made, tokens = model(), torch.randint(0, 300, (100,))
    plain, centred = (ModelRunner(made, level=level, key_means=given) for given in (None, means(made)))
    caches = plain.new_cache(fmt=FP32), centred.new_cache(fmt=FP32)
    for part in tokens.split([70, 1, 29]):
        wanted, found = plain(part, caches[0], every=True), centred(part, caches[1], every=True)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-4)
    for layer, mean in means(made).items():
        (keys, values), (kept, same) = (cache.read(layer, 100) for cache in caches)
        torch.testing.assert_close(kept, keys - mean, rtol=1e-4, atol=2e-4)
        torch.testing.assert_close(same, values, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(("change", "words"), [
    ({1: torch.zeros(2, 12)}, r"key means \[2, 12\] for each of 3 layers, and got 1 of \[2, 12\]"),
    ({layer: torch.zeros(2, 6) for layer in range(3)}, r"got 3 of \[2, 6\]; calibrate this model"),
    ({}, "got 0 of none"),
    ({layer: torch.full((2, 12), torch.nan) for layer in range(3)}, "NaN or infinite"),
])  # fmt: skip
def test_means_of_another_model_are_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        ModelRunner(model(), key_means=change)


@pytest.mark.parametrize("level", native_bindings.levels())
def test_tiny_keys_and_values_are_stored_exactly(level):
    """Of about 1e-30 and 1e-38, below what other casts tell from zero; scales down to FP32's smallest normal number."""
    made, tokens = model(), torch.randint(0, 300, (64,))
    for layer, size in zip(made.model.layers, (1e-30, 1e-38, 1e-12), strict=True):
        layer.input_layernorm.weight.data *= size
    caches = []
    for name in ("torch", level):
        runner = ModelRunner(made, level=name)
        caches.append(runner.new_cache())
        runner(tokens, caches[-1])
    wanted, found = (cache.tensors for cache in caches)
    assert wanted.key_scale is not None
    assert bool((wanted.key_scale[1, 0] < 2.0**-125).all())
    for name in ("keys", "values", "key_scale", "value_scale"):
        one, other = (getattr(tensors, name).view(torch.uint8) for tensors in (wanted, found))
        assert (one != other).float().mean() < 1e-3
    for layer in range(3):
        assert bool(found.keys[layer, 0].float().any(dim=1).all())
        assert bool(found.values[layer, 0].float().any(dim=2).all())


@pytest.mark.parametrize("level", native_bindings.levels())
def test_infinite_keys_and_values_become_nan(level):
    """E4M3 has no infinity: what leaves FP32 is NaN in the cache, as in the definition, and not the maximum."""
    made, tokens = model(), torch.randint(0, 300, (70,))
    attention = made.model.layers[0]
    attention.input_layernorm.weight.data[7] = 1e37
    for projection, row in ((attention.self_attn.k_proj, 5), (attention.self_attn.v_proj, 20)):
        projection.weight.data[:, 7] = 0.0
        projection.weight.data[row, 7] = 1e4
    plain = ModelRunner(made, level="torch")
    numbers, wanted = plain.new_cache(fmt=FP32), plain.new_cache()
    plain(tokens, numbers)
    plain(tokens, wanted)
    native = ModelRunner(made, level=level)
    found = native.new_cache()
    native(tokens, found)
    for name in ("keys", "values"):
        own = [getattr(cache.tensors, name)[0].float() for cache in (numbers, wanted, found)]
        assert bool(own[0].isinf().any())
        assert torch.equal(own[0].isfinite(), own[1].isfinite())
        assert torch.equal(own[1].isfinite(), own[2].isfinite())


@pytest.mark.parametrize("level", native_bindings.levels())
def test_step_matches_each_sequence_alone(level):
    """Rows of two sequences in turn, in pages of one cache, are what each sequence gives alone."""
    runner, tokens = ModelRunner(model(), level=level), torch.randint(0, 300, (2, 70))
    alone = torch.stack([runner(own, runner.new_cache(128), every=True) for own in tokens])
    t = runner.new_cache(256).tensors
    shared = CacheTensors(
        t.keys, t.values, t.key_scale, t.value_scale, torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    )
    native, found = NativeDecoder(runner._decoder, level=level), []
    for start in range(0, 70, 5):
        sequence = torch.tensor([0, 1]).repeat(5)
        position = torch.arange(start, start + 5).repeat_interleave(2)
        hidden = runner._embed(tokens[:, start : start + 5].t().flatten())
        found.append(native.run(hidden, shared, sequence, position, num_logits=10).view(5, 2, -1))
    torch.testing.assert_close(torch.cat(found).transpose(0, 1), alone, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("level", LEVELS)
def test_a_cache_of_another_model_is_refused(level):
    runner = ModelRunner(model(), level=level)
    for cache in (PagedKVCache(1, 2, 12, max_positions=64), PagedKVCache(3, 2, 16, max_positions=64)):
        with pytest.raises(BackendError, match="new_cache"):
            runner(torch.tensor([1]), cache)
    batch: Any = runner.new_batch(1)
    with pytest.raises(TypeError, match=r"from new_cache\(\), not a KVCacheBatch"):
        runner(torch.tensor([1]), batch)


def test_rows_of_another_model_are_refused():
    runner = ModelRunner(model(), level=native_bindings.levels()[-1])
    tensors, native = runner.new_cache().tensors, NativeDecoder(runner._decoder)
    one = torch.zeros(1, dtype=torch.int64)
    for hidden in (torch.zeros(1, 71), torch.zeros(2, 72), torch.zeros(1, 72).double(), torch.zeros(1, 144)[:, ::2]):
        with pytest.raises(BackendError, match="float32 rows"):
            native.run(hidden, tensors, one, one)
    with pytest.raises(BackendError, match="at least one"):
        native.run(torch.zeros(0, 72), tensors, one[:0], one[:0])
    hidden = torch.zeros(1, 72)
    for name, given in {
        "sequences": (hidden, tensors, one.to("meta"), one),
        "positions": (hidden, tensors, one, one.to("meta")),
        "rows": (hidden.to("meta"), tensors, one, one),
    }.items():
        with pytest.raises(BackendError, match=f"on a CPU, and the {name} are on meta"):
            native.run(*given)
    far = PagedKVCache(3, 2, 12, max_positions=512).tensors
    with pytest.raises(BackendError, match="rotary tables for 256 positions"):
        native.run(torch.zeros(1, 72), far, one, one + 256)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_integer_dtypes_of_tokens_are_equivalent(dtype):
    runner, tokens = ModelRunner(model()), torch.ones(72, dtype=torch.int64)
    wanted = runner(tokens, runner.new_cache())
    assert torch.equal(runner(tokens.to(dtype), runner.new_cache()), wanted)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("tie", [True, False])
def test_runner_copies_the_weights(level, tie):
    made = model(tie=tie)
    runner = ModelRunner(made, level=level)
    before = runner(torch.arange(9), runner.new_cache())
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(2.0)
        made.model.cos.zero_()
    assert torch.equal(runner(torch.arange(9), runner.new_cache()), before)


def test_gates_within_the_range_of_exp():
    """silu of -21 to -86, times what makes it visible: about as large as the gates themselves."""
    made = model(tie=False)
    made.model.embed_tokens.weight.data.fill_(1.0)
    for layer in made.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.post_attention_layernorm.weight.data.fill_(1.0)
    mlp, gates = made.model.layers[0].mlp, torch.linspace(21, 86, 200)
    mlp.gate_proj.weight.data[:] = -gates[:, None] / 72
    mlp.up_proj.weight.data[:] = gates.exp()[:, None] / 72
    assert_all_levels_agree(made)


@torch.no_grad()
def assert_all_levels_agree(made):
    logits = []
    for name in LEVELS:
        runner = ModelRunner(made, level=name)
        logits.append(runner(torch.arange(9), runner.new_cache(fmt=FP32)))
    for found in logits[1:]:
        torch.testing.assert_close(found, logits[0], rtol=1e-3, atol=1e-3)


def test_gates_beyond_the_range_of_exp():
    """silu of a number far below zero is zero, and not what is left of it over the largest power of e."""
    made = model()
    made.model.layers[0].mlp.gate_proj.weight.data *= 1e4
    assert_all_levels_agree(made)


def test_bad_input_raises_and_keeps_the_cache():
    runner = ModelRunner(model())
    cache = runner.new_cache(max_positions=64)
    runner(torch.arange(60), cache)
    for tokens, text in (
        (torch.zeros(0, dtype=torch.int64), "one sequence"),
        (torch.zeros(1, 2, dtype=torch.int64), "one sequence"),
        (torch.tensor([7, 300]), "from 0 to 299, not 7 to 300"),
        (torch.tensor([-1]), "from 0 to 299, not -1 to -1"),
        (torch.arange(5), "room for 64 positions, and 65 are needed"),
    ):
        with pytest.raises(ConfigError, match=text):
            runner(tokens, cache)
    wrong: list[Any] = [torch.ones(3), torch.ones(3, dtype=torch.bool), [1, 2]]
    for given in wrong:
        with pytest.raises(TypeError, match="integers"):
            runner(given, cache)
    with pytest.raises(BackendError, match="takes tokens on a CPU, not on meta"):
        runner(torch.arange(3, device="meta"), cache)
    assert cache.length == 60
    large = runner.new_cache(max_positions=1000)
    with pytest.raises(ConfigError, match="has 256 positions, and 257"):
        runner(torch.zeros(257, dtype=torch.int64), large)
    with pytest.raises(BackendError, match="no level"):
        ModelRunner(model(), level="abacus")
    elsewhere = r"generates on the CPU, and this model is on meta: .*vLLM, TensorRT-LLM or Triton, .*octavo export"
    with pytest.raises(ConfigError, match=elsewhere):
        ModelRunner(model().to("meta"))

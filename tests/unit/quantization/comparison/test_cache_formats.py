"""Casts of a cache against a slow search, what the cache of octavo.serving reads, and softmax's own invariance."""

import pytest
import torch

from octavo import E4M3, PerTensor, quantize
from octavo.errors import ConfigError
from octavo.quantization.comparison.cache_formats import (
    CANDIDATES,
    CASTS,
    cached,
    key_means,
    power_of_two_scales,
    searched_scales,
    vector_bytes,
)
from octavo.serving import PagedKVCache
from tests.unit.quantization.tiny_models import HEAD_DIM, HEADS, SHAPE, language_model, windows


def vectors(*shape):
    """Two numbers of each are large, as in keys."""
    x = torch.randn(*shape)
    x[..., 3] += 11
    x[..., 5] -= 7
    return x


def test_powers_of_two_are_what_octavos_cache_reads():
    keys, values = vectors(70, 2, 64), torch.randn(70, 2, 64)
    cache = PagedKVCache(1, 2, 64, max_positions=70)
    cache.store(0, torch.arange(70), keys, values)
    read = cache.read(0, 70)
    assert torch.equal(power_of_two_scales(keys), read[0])
    assert torch.equal(power_of_two_scales(values), read[1])


def test_the_search_takes_the_best_of_its_scales():
    """Vector by vector, candidate by candidate."""
    x = vectors(20, 64)
    for vector, found in zip(x, searched_scales(x), strict=True):
        amax = vector.abs().max()
        scales = [(amax / E4M3.max * (1 + step / CANDIDATES)).bfloat16().float() for step in range(CANDIDATES)]
        tried = [quantize(vector, E4M3, granularity=PerTensor(), scale=scale).dequantize() for scale in scales]
        errors = [float((decoded - vector).square().sum()) for decoded in tried]
        assert torch.equal(found, tried[errors.index(min(errors))])


def test_a_vector_is_searched_for_alone():
    x = vectors(4, 3, 16)
    assert torch.equal(searched_scales(x)[2, 1], searched_scales(x[2, 1]))


def test_the_search_halves_the_squared_error():
    x = vectors(500, 64)
    errors = [float((cast(x) - x).square().sum()) for cast in (searched_scales, power_of_two_scales)]
    assert errors[0] < 0.5 * errors[1]


def test_special_values():
    x = torch.zeros(3, 16)
    x[1, 2], x[2, 2] = torch.nan, 1e-30
    for cast in CASTS.values():
        found = cast(x)
        assert torch.equal(found[0], torch.zeros(16))
        assert found[1].isnan().any()
        assert found[2].isfinite().all()


def test_bytes_of_a_vector():
    assert {name: vector_bytes(name, 64) for name in CASTS} == {"power-of-two": 65, "searched": 66, "centred": 66}


def test_means_are_those_of_all_positions():
    model, text = language_model(), windows()
    seen: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def note(layer, keys, values):
        seen[layer].append(keys)
        return keys, values

    with torch.no_grad(), model.keys_and_values_through(note) as logits:
        logits(text)
    for layer, mean in key_means(model, text).items():
        assert mean.shape == (HEADS, HEAD_DIM)
        torch.testing.assert_close(mean, torch.cat(seen[layer]).flatten(0, 1).mean(0), rtol=1e-5, atol=1e-6)


def test_a_mean_off_all_keys_changes_nothing():
    """The identity that the centred format rests on, with the model's own attention in FP32."""
    model, text = language_model(), windows()
    means = {layer: 5 * torch.randn(HEADS, HEAD_DIM) for layer in range(SHAPE.num_layers)}
    with torch.no_grad():
        expected = model.logits(text)
        with model.keys_and_values_through(lambda layer, k, v: (k - means[layer], v)) as logits:
            torch.testing.assert_close(logits(text), expected, rtol=1e-3, atol=1e-4)


def test_a_cache_casts_both_in_their_dtype():
    keys, values = vectors(1, 4, 2, 16), torch.randn(1, 4, 2, 16)
    mean = torch.randn(2, 16)
    found = cached("centred", {0: mean})(0, keys.bfloat16(), values)
    assert torch.equal(found[0], searched_scales(keys.bfloat16().float() - mean).bfloat16())
    assert torch.equal(found[1], searched_scales(values))
    found = cached("power-of-two")(0, keys, values)
    assert torch.equal(found[0], power_of_two_scales(keys))


def test_what_belongs_to_which_cache():
    with pytest.raises(ConfigError, match="use one of power-of-two, searched, centred"):
        cached("int4")
    with pytest.raises(ConfigError, match="if it is centred"):
        cached("searched", {})
    with pytest.raises(ConfigError, match="if it is centred"):
        cached("centred")

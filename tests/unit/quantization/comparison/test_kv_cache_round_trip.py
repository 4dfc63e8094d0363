"""What stands for the cache is what octavo.inference's reads back, bit by bit; means; and softmax's own invariance."""

import pytest
import torch

from octavo.inference import PagedKVCache
from octavo.quantization.comparison.kv_cache_round_trip import as_cached, cached, key_means, vector_bytes
from tests.unit.quantization.tiny_models import HEAD_DIM, HEADS, SHAPE, language_model, windows


def vectors(*shape):
    """Two numbers of each are large, as in keys."""
    x = torch.randn(*shape)
    x[..., 3] += 11
    x[..., 5] -= 7
    return x


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_vectors_are_what_octavos_cache_reads(size):
    keys, values = size * vectors(70, 2, 64), size * torch.randn(70, 2, 64)
    keys[3], keys[4, 0, 1] = 0, torch.nan
    cache = PagedKVCache(1, 2, 64, max_positions=70)
    cache.store(0, torch.arange(70), keys, values)
    for found, read in zip((as_cached(keys), as_cached(values)), cache.read(0, 70), strict=True):
        torch.testing.assert_close(found, read, rtol=0, atol=0, equal_nan=True)


def test_special_values():
    x = torch.zeros(3, 16)
    x[1, 2], x[2, 2] = torch.nan, 1e-30
    found = as_cached(x)
    assert torch.equal(found[0], torch.zeros(16))
    assert found[1].isnan().tolist() == [i == 2 for i in range(16)]
    assert found[2].isfinite().all()


def test_bytes_of_a_vector():
    cache = PagedKVCache(1, 1, 64, max_positions=64)
    assert vector_bytes(64) == cache.nbytes / (2 * 64) == 66


def test_means_are_those_of_all_positions():
    model, text = language_model(), windows()
    seen: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def note(layer, keys, values):
        seen[layer].append(keys)
        return keys, values

    with torch.no_grad():
        model.logits(text, note)
    for layer, mean in key_means(model, text).items():
        assert mean.shape == (HEADS, HEAD_DIM)
        torch.testing.assert_close(mean, torch.cat(seen[layer]).flatten(0, 1).mean(0), rtol=1e-5, atol=1e-6)


def test_a_mean_off_all_keys_changes_nothing():
    """The identity that the centred format rests on, with the model's own attention in FP32."""
    model, text = language_model(), windows()
    means = {layer: 5 * torch.randn(HEADS, HEAD_DIM) for layer in range(SHAPE.num_layers)}
    with torch.no_grad():
        expected = model.logits(text)
        centred = model.logits(text, lambda layer, k, v: (k - means[layer], v))
    torch.testing.assert_close(centred, expected, rtol=1e-3, atol=1e-4)


def test_a_cache_casts_both_in_their_dtype():
    keys, values = vectors(1, 4, 2, 16), torch.randn(1, 4, 2, 16)
    mean = torch.randn(2, 16)
    found = cached({0: mean})(0, keys.bfloat16(), values)
    assert torch.equal(found[0], as_cached(keys.bfloat16().float() - mean).bfloat16())
    assert torch.equal(found[1], as_cached(values))
    assert torch.equal(cached()(0, keys, values)[0], as_cached(keys))

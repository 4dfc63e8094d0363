import pytest
import torch

from octavo.errors import ConfigError
from octavo.nn import KVCache


def test_stored_values_are_returned_in_order():
    cache, parts = KVCache(2, 7, 3, 4), [torch.randn(2, n, 3, 4) for n in (3, 1, 0, 2)]
    for part in parts:
        keys, values = cache.append(part, -part)
    assert cache.position == 6
    assert torch.equal(keys, torch.cat(parts, dim=1))
    assert torch.equal(values, -keys)
    assert keys.data_ptr() == cache.keys.data_ptr(), "a view, not a copy"


def test_a_smaller_position_forgets():
    cache = KVCache(1, 4, 1, 2)
    cache.append(torch.ones(1, 4, 1, 2), torch.ones(1, 4, 1, 2))
    cache.position = 1
    keys, _ = cache.append(torch.full((1, 1, 1, 2), 5.0), torch.zeros(1, 1, 1, 2))
    assert keys.flatten().tolist() == [1, 1, 5, 5]


def test_cache_keeps_its_own_dtype():
    cache = KVCache(1, 4, 1, 2, dtype=torch.bfloat16)
    keys, _ = cache.append(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2))
    assert keys.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (torch.zeros(1, 2, 3, 4), r"takes keys and values \[2, T, 3, 4\], not \(1, 2, 3, 4\)"),
        (torch.zeros(2, 1, 3, 5), r"not \(2, 1, 3, 5\)"),
        (torch.zeros(2, 3, 4), r"not \(2, 3, 4\)"),
        (torch.zeros(2, 5, 3, 4), "has room for 6 positions, and 7 are needed; make one with more max_positions"),
        (torch.zeros(2, 1, 3, 4, requires_grad=True), r"keeps no gradients; run the model under torch.no_grad\(\)"),
    ],
)
def test_refused_calls_change_nothing(keys, words):
    cache = KVCache(2, 6, 3, 4)
    cache.append(torch.ones(2, 2, 3, 4), torch.ones(2, 2, 3, 4))
    before = cache.keys.clone()
    with pytest.raises(ConfigError, match=words):
        cache.append(keys, keys)
    assert cache.position == 2
    assert torch.equal(cache.keys, before)


def test_sizes_are_checked():
    with pytest.raises(ConfigError, match="max_positions must be a whole number"):
        KVCache(1, 0, 1, 1)

"""Checks of a decoder's tensors before a kernel gets their addresses."""

import pytest

from octavo.errors import BackendError
from octavo.formats import BF16, E4M3
from octavo.inference import PagedKVCache
from octavo.inference.native_decoder import PAGE, CacheTensors


def test_cache_layers_have_separate_memory():
    t = PagedKVCache(3, 2, 16, max_positions=PAGE + 1).tensors
    first, second = t.addresses(0), t.addresses(1)
    per_layer = [x[0].nbytes for x in (t.keys, t.key_scale, t.values, t.value_scale) if x is not None]
    assert [b - a for a, b in zip(first, second, strict=True)] == per_layer
    plain = PagedKVCache(3, 2, 16, max_positions=1, fmt=BF16).tensors
    assert plain.addresses(2)[1] == plain.addresses(2)[3] == 0


def test_cache_of_another_model_is_refused():
    t = PagedKVCache(3, 2, 16, max_positions=1).tensors
    t.check_made_for(3, 2, 16)
    for other in ((2, 2, 16), (3, 1, 16), (3, 2, 8)):
        with pytest.raises(BackendError, match="this cache is for 3 layers with 2 key heads of width 16"):
            t.check_made_for(*other)


def test_codes_need_the_scales_of_all_vectors():
    t = PagedKVCache(1, 1, 16, max_positions=1, fmt=E4M3).tensors
    with pytest.raises(BackendError, match="a cache has keys"):
        CacheTensors(t.keys, t.values, t.key_scale, None, t.table)

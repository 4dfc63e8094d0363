"""The cache of keys and values: what is stored is what octavo.quantize gives, and is read back where it belongs."""

import pytest
import torch

import octavo
from octavo.errors import ConfigError
from octavo.formats import BF16, E4M3, E5M2, FP32
from octavo.inference import PagedKVCache
from octavo.numerics.scale_search import searched_scale


@pytest.mark.parametrize("size", [1.0, 1e-30, 2.0**-130, 1e30])
def test_codes_and_scales_are_those_of_quantize(size):
    cache = PagedKVCache(2, 3, 16, max_positions=200)
    keys, values = size * torch.randn(2, 150, 3, 16)
    cache.store(1, torch.arange(150), keys, values)
    for stored, vectors in zip(cache.read(1, 150), (keys, values), strict=True):
        scale = searched_scale(vectors)
        assert torch.equal(
            stored, octavo.quantize(vectors, E4M3, granularity=octavo.PerRow(), scale=scale).dequantize()
        )
        error = (stored.double() - vectors.double()).abs()
        assert (error <= (vectors.double().abs() / 16).maximum(scale * 2.0**-10)).all()  # half an ulp
        assert stored.any(-1).all()
    assert all(not bool(x.any()) for x in cache.read(0, 150))


@pytest.mark.parametrize("fmt", [BF16, FP32], ids=str)
def test_high_precision_is_rounded_once(fmt):
    cache = PagedKVCache(1, 2, 8, max_positions=70, fmt=fmt)
    keys, values = torch.randn(2, 70, 2, 8)
    cache.store(0, torch.arange(70), keys, values)
    for stored, vectors in zip(cache.read(0, 70), (keys, values), strict=True):
        assert torch.equal(stored, vectors.to(fmt.torch_dtype).float())


def test_room_is_checked_against_whole_pages():
    cache = PagedKVCache(1, 1, 8, max_positions=65)
    assert cache.capacity == 128
    cache.check_room(128)
    cache.advance(126)
    cache.check_room(2)
    with pytest.raises(ConfigError, match="room for 128 positions, and 129 are needed"):
        cache.check_room(3)
    cache.length = 100
    cache.check_room(28)
    for length in (-1, 101):
        with pytest.raises(ConfigError, match="100 positions are filled"):
            cache.length = length


def test_bytes_are_half_of_bf16_and_a_scale():
    sizes = {fmt: PagedKVCache(3, 2, 64, max_positions=640, fmt=fmt).nbytes for fmt in (E4M3, BF16)}
    assert sizes[E4M3] / sizes[BF16] == 66 / 128


@pytest.mark.parametrize(
    ("change", "text"),
    [({"layers": 0}, "layers"), ({"max_positions": 0}, "max_positions"), ({"fmt": E5M2}, "E4M3, BF16 or FP32")],
)
def test_bad_sizes_are_named(change, text):
    given = {"layers": 1, "kv_heads": 1, "head_dim": 8, "max_positions": 8} | change
    with pytest.raises(ConfigError, match=text):
        PagedKVCache(given.pop("layers"), given.pop("kv_heads"), given.pop("head_dim"), **given)

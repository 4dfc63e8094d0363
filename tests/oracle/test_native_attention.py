"""Attention over a paged cache against softmax in FP64, and the cache's codes against octavo.quantize."""

import math

import pytest
import torch

from octavo.errors import BackendError
from octavo.formats import BF16, E4M3, FP32
from octavo.inference import PagedKVCache
from octavo.inference.native_decoder import MAX_HEAD_DIM, PAGE, CacheTensors, attend
from octavo.kernels import native_bindings

pytestmark = pytest.mark.skipif(
    bool(native_bindings.why_absent()), reason=f"no native kernels: {native_bindings.why_absent()}"
)

FORMATS = (E4M3, BF16, FP32)


def filled(fmt, positions, kv_heads, head_dim, *, size=1.0):
    cache = PagedKVCache(1, kv_heads, head_dim, max_positions=positions, fmt=fmt)
    keys, values = (size * torch.randn(positions, kv_heads, head_dim) for _ in range(2))
    cache.store(0, torch.arange(positions), keys, values)
    return cache


def native(queries, tensors: CacheTensors, position, *, sequence=None, level=None):
    return attend(
        queries,
        tensors,
        0,
        sequence=torch.zeros_like(position) if sequence is None else sequence,
        position=position,
        scale=queries.shape[2] ** -0.5,
        level=level,
    )


def exact(queries, cache, position):
    """In FP64, head by head."""
    keys, values = (x.double() for x in cache.read(0, int(position.max()) + 1))
    group = queries.shape[1] // keys.shape[1]
    out = torch.empty(queries.shape, dtype=torch.float64)
    for row, last in enumerate(position.tolist()):
        for head in range(queries.shape[1]):
            own = keys[: last + 1, head // group], values[: last + 1, head // group]
            weights = torch.softmax(own[0] @ queries[row, head].double() / queries.shape[2] ** 0.5, dim=0)
            out[row, head] = weights @ own[1]
    return out


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (8, 2), (5, 1)])
@pytest.mark.parametrize("head_dim", [2, 20, 64, 80, 512])
def test_every_level_is_near_exact_softmax(fmt, heads, kv_heads, head_dim):
    positions = 2 * PAGE + 37
    cache = filled(fmt, positions, kv_heads, head_dim)
    position = torch.tensor([0, 1, PAGE - 1, PAGE, positions - 1])
    queries = torch.randn(len(position), heads, head_dim)
    wanted = exact(queries, cache, position)
    for level in native_bindings.levels():
        torch.testing.assert_close(
            native(queries, cache.tensors, position, level=level).double(), wanted, rtol=1e-5, atol=3e-6
        )


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("size", [1e-30, 1e-4, 1e4, 1e30])
def test_vectors_of_any_size(fmt, size):
    cache = filled(fmt, 100, 2, 64, size=size)
    queries, position = torch.randn(1, 4, 64) / size, torch.tensor([99])
    assert all(bool(x.any()) for x in cache.read(0, 100))
    for level in native_bindings.levels():
        found = native(queries, cache.tensors, position, level=level)
        torch.testing.assert_close(found.double(), exact(queries, cache, position), rtol=1e-4, atol=1e-5 * size)


def test_the_smallest_scale():
    """FP32's smallest normal number: of keys that meet large queries, of a value beside larger ones."""
    cache = PagedKVCache(1, 1, 8, max_positions=3)
    keys, values = torch.randn(2, 3, 1, 8)
    cache.store(0, torch.arange(3), 2.0**-127 * keys, 2.0**-118 * values)
    t = cache.tensors
    assert t.key_scale is not None
    assert t.value_scale is not None
    assert bool((t.key_scale[..., :3] < 2.0**-125).all())
    t.value_scale[..., 1] = 2.0**-126
    queries, position = 2.0**125 * torch.randn(1, 2, 8), torch.tensor([2])
    for level in native_bindings.levels():
        found = native(queries, t, position, level=level)
        torch.testing.assert_close(found.double(), exact(queries, cache, position), rtol=1e-5, atol=2.0**-140)


@pytest.mark.parametrize("level", native_bindings.levels())
def test_a_weight_is_e_to_the_power_of_its_score(level):
    """Beside a score of 0, a score below -17.5 has a weight and the sum of all is 1: the output is e^x, to 2 ulps."""
    powers = torch.cat([torch.linspace(-86.99, -17.5, 20_000), -math.log(2) * (torch.arange(26, 125) + 0.5)])
    cache = PagedKVCache(1, 1, 2, max_positions=2, fmt=FP32)
    cache.store(
        0, torch.arange(2), torch.tensor([[[0.0, 0.0]], [[1.0, 0.0]]]), torch.tensor([[[0.0, 0.0]], [[1.0, 1.0]]])
    )
    position = torch.ones(len(powers), dtype=torch.int64)
    queries = torch.stack([powers, torch.zeros_like(powers)], dim=1)[:, None]
    sequence = torch.zeros_like(position)
    found = attend(queries, cache.tensors, 0, sequence=sequence, position=position, scale=1.0, level=level)
    wanted = powers.double().exp()
    ulp = torch.exp2(wanted.log2().floor() - 23)
    assert ((found[:, 0, 0] - wanted).abs() <= 2 * ulp).all()


def test_values_of_very_different_size_in_one_page():
    """The query sees a vector 1e9 times smaller than another; what it weighs next to nothing must not hide it."""
    cache = PagedKVCache(1, 1, 8, max_positions=2)
    keys = torch.tensor([[[100.0] + 7 * [0.0]], [[-100.0] + 7 * [0.0]]])
    values = torch.tensor([[8 * [1e-9]], [8 * [1.0]]])
    cache.store(0, torch.arange(2), keys, values)
    queries, position = torch.ones(1, 1, 8), torch.tensor([1])
    for level in native_bindings.levels():
        found = native(queries, cache.tensors, position, level=level)
        torch.testing.assert_close(found.double(), exact(queries, cache, position), rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", [(0, 4, 16), (2, 0, 16)])
def test_no_rows_or_no_heads_give_nothing(shape):
    cache = filled(E4M3, 5, 2, 16)
    assert native(torch.ones(shape), cache.tensors, torch.zeros(shape[0], dtype=torch.int64)).shape == shape


def test_large_scores_do_not_overflow():
    cache = filled(FP32, 130, 1, 8)
    queries, position = 1e4 * torch.randn(3, 2, 8), torch.tensor([0, 64, 129])
    for level in native_bindings.levels():
        found = native(queries, cache.tensors, position, level=level)
        assert found.isfinite().all()
        torch.testing.assert_close(found.double(), exact(queries, cache, position), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_pages_may_lie_anywhere_and_rows_do_not_meet(fmt):
    """Three sequences in shuffled pages, rows in any order: each as if it were alone."""
    lengths, kv_heads, head_dim = (200, 65, 1), 2, 48
    alone = [filled(fmt, length, kv_heads, head_dim) for length in lengths]
    places = torch.randperm(7)[:7].tolist()
    shared = PagedKVCache(1, kv_heads, head_dim, max_positions=7 * PAGE, fmt=fmt).tensors
    table = torch.zeros(3, 4, dtype=torch.int32)
    for number, cache in enumerate(alone):
        for page in range(cache.tensors.table.shape[1]):
            place = places.pop()
            table[number, page] = place
            for name in ("keys", "values", "key_scale", "value_scale"):
                to, of = getattr(shared, name), getattr(cache.tensors, name)
                if to is not None:
                    to.view(torch.uint8)[0, place] = of.view(torch.uint8)[0, page]
    tensors = CacheTensors(shared.keys, shared.values, shared.key_scale, shared.value_scale, table)
    sequence, position = torch.tensor([1, 0, 2, 0, 1]), torch.tensor([64, 199, 0, 3, 10])
    queries = torch.randn(5, 4, head_dim)
    for level in native_bindings.levels():
        together = native(queries, tensors, position, sequence=sequence, level=level)
        for row in range(5):
            own = alone[int(sequence[row])].tensors
            assert torch.equal(
                together[row], native(queries[row : row + 1], own, position[row : row + 1], level=level)[0]
            )


def test_threads_change_nothing():
    cache, position = filled(E4M3, 700, 3, 64), torch.arange(600, 700)
    queries = torch.randn(100, 9, 64)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(native(queries, cache.tensors, position))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_nan_affects_only_the_queries_that_attend_to_it(fmt):
    cache = filled(fmt, 140, 2, 64)
    keys, values = torch.randn(2, 1, 2, 64)
    values[0, 1, 5] = math.nan
    cache.store(0, torch.tensor([100]), keys, values)
    position, queries = torch.tensor([99, 100, 139]), torch.randn(3, 4, 64)
    for level in native_bindings.levels():
        found = native(queries, cache.tensors, position, level=level)
        is_bad = found.isnan()
        assert not is_bad[0].any()
        assert not is_bad[:, :2].any()
        assert is_bad[1:, 2:, 5].all()
        assert is_bad.sum() == 4


def test_both_languages_have_the_same_page():
    from octavo.kernels import _native  # absent where it could not be built

    assert (_native.PAGE, _native.MAX_HEAD_DIM) == (PAGE, MAX_HEAD_DIM)


def test_positions_and_pages_out_of_range_are_refused():
    t = filled(E4M3, 70, 1, 16).tensors
    queries, position = torch.randn(1, 1, 16), torch.tensor([3])
    for place, text in (
        (torch.tensor([128]), "128 positions, 0 to 127, not 128 to 128"),
        (torch.tensor([-1]), "128 positions, 0 to 127, not -1 to -1"),
        (position.int(), r"contiguous int64 \[R\], not \(1,\) torch\.int32 and \(1,\) torch\.int32"),
        (torch.tensor([[3]]), r"contiguous int64 \[R\], not \(1, 1\) torch\.int64 and \(1, 1\) torch\.int64"),
    ):
        with pytest.raises(BackendError, match=text):
            native(queries, t, place)
    with pytest.raises(BackendError, match="2 pages, 0 to 1, not 1 to 2"):
        native(queries, CacheTensors(t.keys, t.values, t.key_scale, t.value_scale, t.table + 1), position)
    with pytest.raises(BackendError, match="1 sequences, 0 to 0, not 1 to 1"):
        native(queries, t, position, sequence=torch.ones(1, dtype=torch.int64))
    for options, name in (
        ({"sequence": position.to("meta")}, "sequences"),
        ({"sequence": position, "position": position.to("meta")}, "positions"),
        ({"queries": queries.to("meta")}, "rows"),
    ):  # fmt: skip
        with pytest.raises(BackendError, match=f"on a CPU, and the {name} are on meta"):
            native(**({"queries": queries, "tensors": t, "position": position} | options))
    with pytest.raises(BackendError, match="no level"):
        native(queries, t, position, level="none")
    with pytest.raises(BackendError, match=r"queries \[R, heads, 16\]"):
        native(torch.randn(1, 1, 8), t, position)
    for parts in (
        (t.keys, t.values, None, None, t.table),
        (t.keys, t.values[..., :32, :], t.key_scale, t.value_scale, t.table),
        (t.keys, t.values, t.key_scale, t.value_scale, t.table.long()),
        (t.keys.float(), t.values.float(), t.key_scale, t.value_scale, t.table),
    ):
        with pytest.raises(BackendError, match="a cache has keys"):
            CacheTensors(*parts)
    with pytest.raises(BackendError, match="a cache must be on a CPU, not on cpu and meta"):
        CacheTensors(t.keys, t.values, t.key_scale, t.value_scale, t.table.to("meta"))
    with pytest.raises(BackendError, match="contiguous, not of strides"):
        CacheTensors(t.keys, t.values, t.key_scale, t.value_scale, t.table.expand(2, -1).t().contiguous().t())

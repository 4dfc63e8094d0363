"""The cache's kernels against octavo's own cache and rotation, bit by bit, and attention against softmax in FP64."""

import pytest
import torch

from octavo.errors import BackendError
from octavo.formats import BF16, E4M3, FP32
from octavo.kernels.cuda_decoding import _held, _room_for_keys
from octavo.kernels.decoding import PAGE, CacheTensors
from octavo.kernels.triton import attention
from octavo.kernels.triton.attention import attend
from octavo.kernels.triton.cache import store
from octavo.nn import rotary_table, rotate
from octavo.serving import PagedKVCache

FORMATS = (E4M3, BF16, FP32)


def moved(cache: CacheTensors, device, table=None) -> CacheTensors:
    """On a device, with the pages of another table if there is one."""
    key_scale, value_scale = (x if x is None else x.to(device) for x in (cache.key_scale, cache.value_scale))
    own = cache.table if table is None else table
    return CacheTensors(cache.keys.to(device), cache.values.to(device), key_scale, value_scale, own.to(device))


def same_bits(one: CacheTensors, other: CacheTensors) -> bool:
    pairs = [(getattr(one, name), getattr(other, name)) for name in ("keys", "values", "key_scale", "value_scale")]
    return all(torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8)) for a, b in pairs if a is not None)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (3, 1, 20), (2, 2, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_stored_has_the_bits_of_the_definition(fmt, heads, kv_heads, dim, dtype, device):
    rows, position = 9, torch.tensor([0, 1, 63, 64, 65, 100, 127, 30, 31])
    qkv = (torch.randn(rows, heads + 2 * kv_heads, dim) * torch.logspace(-40, 30, rows)[:, None, None]).to(dtype)
    if dtype is torch.bfloat16 and device.type == "cpu":  # the interpreter takes its subnormal numbers for zeros
        qkv[qkv.abs() < torch.finfo(dtype).tiny] = 0
    qkv[3, heads] = 0
    qkv[4, -1, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    cos, sin = rotary_table(dim, 2 * PAGE)
    queries, keys, values = qkv.float().split([heads, kv_heads, kv_heads], dim=1)
    wanted = PagedKVCache(2, kv_heads, dim, max_positions=2 * PAGE, fmt=fmt)
    found = moved(wanted.tensors, device)
    turned, keys = (rotate(x[None], cos[position], sin[position])[0] for x in (queries, keys))
    mean = torch.randn(kv_heads, dim)
    wanted.store(1, position, keys - mean, values)
    made = store(
        qkv.flatten(1).to(device), found, 1, cos=cos.to(device), sin=sin.to(device), key_mean=mean.to(device),
        sequence=torch.zeros(rows, dtype=torch.int64, device=device), position=position.to(device),
    )  # fmt: skip
    assert torch.equal(made.cpu(), turned)
    assert same_bits(found, wanted.tensors)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 2, 20), (1, 1, 16)])
def test_rows_that_begin_a_text_need_not_read_the_cache(fmt, heads, kv_heads, dim, device):
    """Some rows of a text that ends in its second page, the last before the edge and the first behind it with them."""
    place = torch.tensor([0, 1, 30, PAGE - 2, PAGE - 1, PAGE, PAGE + 1, PAGE + 2], device=device)
    found = moved(PagedKVCache(1, kv_heads, dim, max_positions=2 * PAGE, fmt=fmt).tensors, device)
    kept = _room_for_keys(found, len(place))
    assert kept.dtype is (torch.float32 if fmt is FP32 else torch.bfloat16)
    qkv = torch.randn(len(place), (heads + 2 * kv_heads) * dim, device=device)
    qkv *= torch.logspace(-4, 4, len(place), device=device)[:, None]
    angles = torch.ones(2 * PAGE, dim, device=device)
    made = store(
        qkv, found, 0, cos=angles, sin=0 * angles, key_mean=torch.randn(kv_heads, dim, device=device),
        sequence=torch.zeros_like(place), position=place, kept=kept,
    )  # fmt: skip
    assert torch.equal(made, qkv.view(len(place), -1, dim)[:, :heads].to(kept.dtype))
    for own, held in zip(kept.permute(1, 2, 0, 3), _held(found, 0, PAGE + 3), strict=True):
        assert torch.equal(own, held[:, place])


def filled(fmt, positions, kv_heads, dim, *, size=1.0):
    cache = PagedKVCache(1, kv_heads, dim, max_positions=positions, fmt=fmt)
    keys, values = (size * torch.randn(positions, kv_heads, dim) for _ in range(2))
    cache.store(0, torch.arange(positions), keys, values)
    return cache


def exact(queries, cache, position, scale):
    """In FP64, head by head."""
    keys, values = (x.double() for x in cache.read(0, int(position.max()) + 1))
    group = queries.shape[1] // keys.shape[1]
    out = torch.empty(queries.shape, dtype=torch.float64)
    for row, last in enumerate(position.tolist()):
        for head in range(queries.shape[1]):
            own = keys[: last + 1, head // group], values[: last + 1, head // group]
            out[row, head] = torch.softmax(own[0] @ queries[row, head].double() * scale, dim=0) @ own[1]
    return out


def bound(queries, cache, position, scale):
    """Two parts of bfloat16 leave 2^-16 of a query and of a weight; scores and sums are FP32."""
    keys, values = (x.double() for x in cache.read(0, int(position.max()) + 1))
    scores = scale * queries.double().abs().sum(dim=2).max() * keys.abs().max()
    return (2.0**-16 + 2.0**-22) * (2 * scores + 4) * values.abs().max()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 16), (5, 1, 20), (20, 1, 32), (2, 2, 128)])
def test_attention_is_near_exact_softmax(fmt, heads, kv_heads, dim, device):
    positions = 2 * PAGE + 37
    cache, position = filled(fmt, positions, kv_heads, dim), torch.tensor([0, 1, PAGE - 1, PAGE, positions - 1])
    queries, scale = torch.randn(len(position), heads, dim), dim**-0.5
    found = attend(
        queries.to(device), moved(cache.tensors, device), 0, sequence=torch.zeros_like(position).to(device),
        position=position.to(device), scale=scale,
    )  # fmt: skip
    wanted = exact(queries, cache, position, scale)
    assert bool(((found.double().cpu() - wanted).abs() <= bound(queries, cache, position, scale)).all())


def test_sequences_have_pages_of_their_own_and_leftovers_do_not_count(device):
    """Two sequences, their pages mixed, behind each what an earlier text left: NaN, and infinite scales of values."""
    one, other = filled(E4M3, 3 * PAGE, 2, 32), filled(E4M3, 3 * PAGE, 2, 32)
    table, position = torch.tensor([[4, 0, 3], [1, 5, 2]], dtype=torch.int32), torch.tensor([70, 150])
    shared = PagedKVCache(1, 2, 32, max_positions=6 * PAGE).tensors
    for cache, pages, last in zip((one, other), table.long(), position.tolist(), strict=True):
        for name in ("keys", "values", "key_scale", "value_scale"):
            to, own = (getattr(tensors, name).view(torch.uint8) for tensors in (shared, cache.tensors))
            to[:, pages] = own
        page, slot = pages[last // PAGE], last % PAGE + 1
        shared.keys.view(torch.uint8)[0, page, :, :, slot:] = 0x7F
        shared.values.view(torch.uint8)[0, page, :, slot:] = 0x7F
        for name, leftover in (("key_scale", torch.nan), ("value_scale", torch.inf)):
            getattr(shared, name)[0, page, :, slot:] = leftover
    queries = torch.randn(2, 4, 32)
    found = attend(
        queries.to(device), moved(shared, device, table), 0, sequence=torch.tensor([0, 1]).to(device),
        position=position.to(device), scale=0.2,
    ).cpu()  # fmt: skip
    for row, cache in enumerate((one, other)):
        own = exact(queries[row : row + 1], cache, position[row : row + 1], 0.2)
        limit = bound(queries, cache, position[row : row + 1], 0.2)
        assert bool(((found[row].double() - own[0]).abs() <= limit).all())


def test_room_for_more_changes_the_order_of_sums_alone(device):
    cache, position = filled(E4M3, 10 * PAGE, 1, 16), torch.tensor([2 * PAGE + 5], device=device)
    sequence, queries = torch.zeros(1, dtype=torch.int64, device=device), torch.randn(1, 2, 16, device=device)
    short = moved(cache.tensors, device, cache.tensors.table[:, :3].contiguous())
    found = [
        attend(queries, tensors, 0, sequence=sequence, position=position, scale=0.25)
        for tensors in (short, moved(cache.tensors, device))
    ]
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_parts_that_do_not_fit_into_registers_are_joined_one_after_another(device, monkeypatch):
    """Ten pages are ten parts, joined two at a time; a shorter text leaves the last four without anything."""
    cache, position = filled(E4M3, 10 * PAGE, 1, 20), torch.tensor([6 * PAGE - 1, 10 * PAGE - 1, 0])
    queries = torch.randn(3, 2, 20)

    def found() -> torch.Tensor:
        return attend(
            queries.to(device), moved(cache.tensors, device), 0, sequence=torch.zeros_like(position).to(device),
            position=position.to(device), scale=0.25,
        ).double().cpu()  # fmt: skip

    at_once = found()
    monkeypatch.setattr(attention, "_JOINED", 2 * 32)  # two parts of 20 numbers, of room for 32
    limit = bound(queries, cache, position, 0.25)
    for each in (at_once, found()):
        assert bool(((each - exact(queries, cache, position, 0.25)).abs() <= limit).all())
    torch.testing.assert_close(found(), at_once, rtol=1e-5, atol=1e-6)


def test_queries_of_another_model_are_refused(device):
    cache = moved(filled(E4M3, PAGE, 2, 16).tensors, device)
    one = torch.zeros(1, dtype=torch.int64, device=device)
    for queries in (torch.zeros(1, 3, 16), torch.zeros(1, 4, 8), torch.zeros(1, 4, 16).double()):
        with pytest.raises(BackendError, match="heads a multiple of 2"):
            attend(queries.to(device), cache, 0, sequence=one, position=one, scale=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("positions", [1000, 32768])
def test_long_contexts(dim, positions, device):
    cache, position = filled(E4M3, positions, 8, dim), torch.tensor([positions - 1, positions // 3])
    queries = torch.randn(2, 32, dim)
    found = attend(
        queries.to(device), moved(cache.tensors, device), 0, sequence=torch.zeros_like(position).to(device),
        position=position.to(device), scale=dim**-0.5,
    )  # fmt: skip
    wanted = exact(queries, cache, position, dim**-0.5)
    limit = bound(queries, cache, position, dim**-0.5)
    assert bool(((found.double().cpu() - wanted).abs() <= limit).all())

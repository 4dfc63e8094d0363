"""Attention of few rows over a paged cache, FP8 or not: every row over its own sequence, up to its own position.

The cache's layout stands in kernels/decoding.py; D numbers a head, pages of 64 positions.

A sequence's pages are dealt out to programs, by its length, which stays on the device: the grid depends on nothing
but the cache's room, so a captured CUDA graph serves every length. Each program keeps, for its pages, the largest
score, the sum of exp(score - largest) and the weighted sum of the values; a second kernel joins those in a fixed order.
The query heads that share a key head are the rows of one tile, so keys and values are read once for all of them.

Codes are widened to bfloat16, which is exact; queries, and the weights of the values, are the sum of two bfloat16
numbers, 2^-16 aside; sums are FP32. A key's scale meets its scores and a value's its weights.

Bytes of a row: (2 · D + 4) · kv heads for each position up to its own, which is the minimum, and 8 · D + 16 for each
head and part of what is kept in between, which the second-level cache holds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.errors import BackendError
from octavo.kernels.decoding import PAGE, CacheTensors
from octavo.kernels.triton import launching
from octavo.kernels.triton.cache import of_layer
from octavo.kernels.triton.codes import has_hardware_casts, number_from_code, round_to
from octavo.kernels.triton.few_rows import multiply_wide

__all__ = ["attend"]

_PROGRAMS = 528  # four to a multiprocessor
_JOINED = 8192  # numbers of the parts of a head that are added at once: 64 a thread


@triton.jit
def _numbers(held, CODES: tl.constexpr, HARDWARE: tl.constexpr):
    """What a tile of the cache holds, as bfloat16, or FP32 if that is what it holds."""
    if CODES:
        made = number_from_code(held, 3, HARDWARE).to(tl.bfloat16)
    else:
        made = held
    return made


@triton.jit
def attend_kernel(
    queries, keys, key_scale, values, value_scale, table, sequence, position, found, largest, total,
    scale, pages, heads, kv_heads,
    GROUP: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    CODES: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    part, parts, head, row = tl.program_id(0), tl.num_programs(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    q, d, t = tl.arange(0, QUERIES), tl.arange(0, WIDTH), tl.arange(0, SIZE)
    last = tl.load(position + row).to(tl.int32)
    each = tl.cdiv(last // SIZE + 1, parts)
    own_table = table + tl.load(sequence + row) * pages
    kept = (row * heads + head * GROUP + q) * parts + part
    inside = (q < GROUP)[:, None] & (d < D)[None, :]
    query = tl.load(queries + (row * heads + head * GROUP + q)[:, None] * D + d[None, :], mask=inside, other=0.0)
    maximum = tl.full([QUERIES], float("-inf"), tl.float32)
    sums = tl.zeros([QUERIES], tl.float32)
    weighted = tl.zeros([QUERIES, WIDTH], tl.float32)
    for page in range(part * each, tl.minimum((part + 1) * each, last // SIZE + 1)):
        first = (tl.load(own_table + page).to(tl.int64) * kv_heads + head) * SIZE
        seen = page * SIZE + t <= last  # what lies beyond may be left over, and no number
        held = tl.load(keys + first * D + d[:, None] * SIZE + t[None, :], mask=(d < D)[:, None], other=0)
        scores = multiply_wide(query, _numbers(held, CODES, HARDWARE), tl.zeros([QUERIES, SIZE], tl.float32)) * scale
        if CODES:
            scores *= tl.load(key_scale + first + t).to(tl.float32)[None, :]
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(maximum - higher)
        sums = sums * shrink + tl.sum(weights, axis=1)
        if CODES:
            weights *= tl.load(value_scale + first + t, mask=seen, other=0.0).to(tl.float32)[None, :]
        inside_values = seen[:, None] & (d < D)[None, :]
        held = tl.load(values + (first + t)[:, None] * D + d[None, :], mask=inside_values, other=0)
        weighted = multiply_wide(weights, _numbers(held, CODES, HARDWARE), weighted * shrink[:, None])
        maximum = higher
    tl.store(largest + kept, maximum, mask=q < GROUP)
    if part * each <= last // SIZE:
        tl.store(total + kept, sums, mask=q < GROUP)
        tl.store(found + kept[:, None] * D + d[None, :], weighted, mask=inside)


@triton.jit
def join_kernel(
    found, largest, total, out, parts,
    D: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, HEIGHT: tl.constexpr,
):  # fmt: skip
    """A head's parts, HEIGHT of them at once; PARTS is a power of two, all of them or more."""
    head = tl.program_id(0).to(tl.int64)
    every, d = tl.arange(0, PARTS), tl.arange(0, WIDTH)
    highest = tl.load(largest + head * parts + every, mask=every < parts, other=float("-inf"))
    top = tl.max(highest, axis=0)  # of the first part at least, which sees the first position
    total_of_each = tl.load(total + head * parts + every, mask=highest > float("-inf"), other=0.0)
    sums = tl.sum(tl.exp(highest - top) * total_of_each, axis=0)
    weighted = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for first in range(0, parts, HEIGHT):
        part = first + tl.arange(0, HEIGHT)
        maximum = tl.load(largest + head * parts + part, mask=part < parts, other=float("-inf"))
        inside = (maximum > float("-inf"))[:, None] & (d < D)[None, :]
        own = tl.load(found + (head * parts + part)[:, None] * D + d[None, :], mask=inside, other=0.0)
        weighted += own * tl.exp(maximum - top)[:, None]
    y = tl.sum(weighted, axis=0) / sums
    tl.store(out + head * D + d, round_to(y, out.dtype.element_ty), mask=d < D)


def attend(
    queries: Tensor,
    cache: CacheTensors,
    layer: int,
    *,
    sequence: Tensor,
    position: Tensor,
    scale: float,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``softmax(queries · keysᵀ · scale) · values`` of every row over its sequence's cache.

    Args:
        queries: float32 [R, heads, D], contiguous; a key head serves heads / kv heads of them that stand side by side.
        cache: keys and values.
        layer: which layer's.
        sequence: of every row, int64 [R], on the device; not looked at here.
        position: of every row, int64 [R], on the device; not looked at here.
        scale: of the scores.
        out_dtype: float32 or bfloat16.

    Returns:
        [R, heads, D]. A row's numbers depend on its own sequence, and on how many rows and how much room there are.

    Raises:
        BackendError: shapes that do not go together.
    """
    _, _, kv_heads, dim, _ = cache.keys.shape
    rows, heads, head_dim = queries.shape
    if head_dim != dim or heads % kv_heads or queries.dtype != torch.float32 or not queries.is_contiguous():
        raise BackendError(
            f"queries are contiguous float32 [R, heads, {dim}], heads a multiple of {kv_heads}, with this cache, not "
            f"{tuple(queries.shape)} {queries.dtype}"
        )
    pages = cache.table.shape[1]
    parts = min(pages, launching.ceil_div(_PROGRAMS, rows * kv_heads))
    found = torch.empty(rows, heads, parts, dim, dtype=torch.float32, device=queries.device)
    largest, total = torch.empty(2, rows, heads, parts, dtype=torch.float32, device=queries.device)
    out = torch.empty(rows, heads, dim, dtype=out_dtype, device=queries.device)
    keys, values, key_scale, value_scale = of_layer(cache, layer)
    width, every = max(16, launching.next_power_of_2(dim)), launching.next_power_of_2(parts)
    launching.launch(
        attend_kernel, (parts, kv_heads, rows),
        queries, keys, key_scale, values, value_scale, cache.table, sequence, position, found, largest, total,
        scale, pages, heads, kv_heads,
        GROUP=heads // kv_heads, D=dim, QUERIES=max(16, launching.next_power_of_2(heads // kv_heads)), WIDTH=width,
        SIZE=PAGE, CODES=key_scale is not None, HARDWARE=has_hardware_casts(queries.device), num_warps=4,
        num_stages=2,
    )  # fmt: skip
    launching.launch(
        join_kernel, (rows * heads,),
        found, largest, total, out, parts,
        D=dim, WIDTH=width, PARTS=every, HEIGHT=min(every, _JOINED // width), num_warps=4,
    )  # fmt: skip
    return out

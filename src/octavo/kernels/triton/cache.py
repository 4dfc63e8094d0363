"""Keys and values on their way into a paged cache: turned by their positions, cast, stored; queries are turned beside.

| tensor   | shape                            | note                                                      |
|----------|----------------------------------|-----------------------------------------------------------|
| qkv      | [R, (heads + 2 · kv heads) · D]  | bfloat16 or float32: query heads, key heads, value heads  |
| cos, sin | [positions, D]                   | float32, as octavo.nn.rotary_table makes them             |
| key_mean | [kv heads, D]                    | float32, subtracted from keys                             |
| queries  | [R, heads, D]                    | float32, or as kept                                       |
| kept     | [R, 2, kv heads, D]              | bfloat16 or float32: keys, values as the cache holds them |

One program for each head of each row. A key or value of an E4M3 cache gets the scale that numerics/scale_search.py
finds and the codes that octavo.quantize would give it; both, and the turned numbers, are bitwise those of the
definition, so nothing is contracted to fused multiply-adds. The cache's layout stands in kernels/decoding.py.

Bytes of a head: it is read once, from where the product before left it, and a key or value written in D + 2. Where a
text begins, its rows attend to nothing but one another: ``kept`` saves them reading the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import E4M3
from octavo.kernels.decoding import PAGE, CacheTensors
from octavo.kernels.triton import launching
from octavo.kernels.triton.codes import (
    code_from_number,
    encode_scale_from_amax,
    finite_magnitude,
    format_constants,
    has_hardware_casts,
    is_infinite,
    number_from_code,
    reciprocal,
    round_to,
)
from octavo.numerics import scale_search

__all__ = ["store"]

_STEPS: tl.constexpr = tl.constexpr(scale_search.STEPS)
_FINE: tl.constexpr = tl.constexpr(scale_search.FINE)
_SMALLEST_AMAX: tl.constexpr = tl.constexpr(scale_search.SMALLEST_AMAX)


@triton.jit
def _searched_scale(vector, MAX: tl.constexpr, MANTISSA: tl.constexpr):
    """numerics.scale_search's scale of a vector, [1]."""
    magnitude, _ = finite_magnitude(vector)
    amax = tl.max(magnitude, axis=0, keep_dims=True)
    tightest = encode_scale_from_amax(amax, MAX, MANTISSA, "rceil", _SMALLEST_AMAX, 0)
    fitting = magnitude * tightest
    dropped: tl.constexpr = 23 - MANTISSA
    best, least = tl.full([1], _STEPS, tl.int32), tl.full([1], 1 << 62, tl.int64)
    for step in tl.static_range(_STEPS, 2 * _STEPS):
        scaled = fitting * (_FINE * _STEPS / step)
        nearest = (scaled.to(tl.int32, bitcast=True) + (1 << (dropped - 1))) >> dropped << dropped
        left = scaled - nearest.to(tl.float32, bitcast=True)
        error = tl.sum((left * left).to(tl.int32), axis=0, keep_dims=True).to(tl.int64) * (step * step)
        best = tl.where(error < least, step, best)
        least = tl.minimum(error, least)
    return best.to(tl.float32) / _STEPS * reciprocal(tightest)


@triton.jit
def _keep(
    vector, data, scales, first, step: tl.constexpr, place, D: tl.constexpr, d,
    CODES: tl.constexpr, MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Store a vector at ``first``, its numbers ``step`` apart, its scale at ``place``; give the numbers kept."""
    if CODES:
        scale = _searched_scale(vector, MAX, MANTISSA)
        encode = reciprocal(scale)
        kept = code_from_number(vector * encode, MAX, MANTISSA, BIAS, True, HARDWARE, is_infinite(vector))
        tl.store(scales + place + tl.arange(0, 1), scale.to(tl.bfloat16))
        number = number_from_code(kept, MANTISSA, HARDWARE) * scale
    else:
        kept = round_to(vector, data.dtype.element_ty)
        number = kept.to(tl.float32)
    tl.store(data + first + d * step, kept, mask=d < D)
    return number


@triton.jit
def store_kernel(
    qkv, cos, sin, key_mean, sequence, position, table, queries, keys, key_scale, values, value_scale, kept,
    pages, heads, kv_heads,
    D: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, CODES: tl.constexpr, KEPT: tl.constexpr,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, WIDTH)
    other = tl.where(d < D // 2, d + D // 2, d - D // 2)
    own_head = qkv + (row * (heads + 2 * kv_heads) + head) * D
    vector = tl.load(own_head + d, mask=d < D, other=0.0).to(tl.float32)
    at = tl.load(position + row)
    if head < heads + kv_heads:
        partner = tl.load(own_head + other, mask=d < D, other=0.0).to(tl.float32)
        partner = tl.where(d < D // 2, -partner, partner)
        turned = vector * tl.load(cos + at * D + d, mask=d < D, other=0.0)
        vector = turned + partner * tl.load(sin + at * D + d, mask=d < D, other=0.0)
    if head < heads:
        own = round_to(vector, queries.dtype.element_ty)
        tl.store(queries + (row * heads + head) * D + d, own, mask=d < D)
    else:
        page = tl.load(table + tl.load(sequence + row) * pages + at // SIZE).to(tl.int64)
        if head < heads + kv_heads:
            vector -= tl.load(key_mean + (head - heads) * D + d, mask=d < D, other=0.0)
            first, slot = (page * kv_heads + head - heads) * SIZE, at % SIZE
            number = _keep(
                vector, keys, key_scale, first * D + slot, SIZE, first + slot, D, d,
                CODES, MAX, MANTISSA, BIAS, HARDWARE,
            )  # fmt: skip
        else:
            place = (page * kv_heads + head - heads - kv_heads) * SIZE + at % SIZE
            number = _keep(
                vector, values, value_scale, place * D, 1, place, D, d,
                CODES, MAX, MANTISSA, BIAS, HARDWARE,
            )  # fmt: skip
        if KEPT:
            own_place = kept + (row * 2 * kv_heads + head - heads) * D
            tl.store(own_place + d, round_to(number, kept.dtype.element_ty), mask=d < D)


def store(
    qkv: Tensor,
    cache: CacheTensors,
    layer: int,
    *,
    cos: Tensor,
    sin: Tensor,
    key_mean: Tensor,
    sequence: Tensor,
    position: Tensor,
    kept: Tensor | None = None,
) -> Tensor:
    """Put a layer's keys, less their mean, and values of R rows into its cache, and give their queries, turned.

    Args:
        qkv: [R, (heads + 2 · kv heads) · D], contiguous.
        cache: takes the keys and values.
        layer: whose.
        cos: of the angles, one row a position.
        sin: the same.
        key_mean: float32 [kv heads, D], contiguous, subtracted from the turned keys.
        sequence: of every row, int64 [R]; not looked at here.
        position: of every row, int64 [R], below the cache's and the table's; not looked at here.
        kept: [R, 2, kv heads, D], contiguous, takes keys and values too, rounded as the cache rounds them.

    Returns:
        float32 [R, heads, D], or in the dtype of ``kept``.
    """
    kv_heads, dim = cache.keys.shape[2], cache.keys.shape[3]
    rows, heads = len(qkv), qkv.shape[1] // dim - 2 * kv_heads
    dtype = torch.float32 if kept is None else kept.dtype
    queries = torch.empty(rows, heads, dim, dtype=dtype, device=qkv.device)
    keys, values, key_scale, value_scale = of_layer(cache, layer)
    launching.launch(
        store_kernel, (rows, heads + 2 * kv_heads),
        qkv, cos, sin, key_mean, sequence, position, cache.table, queries, keys, key_scale, values, value_scale, kept,
        cache.table.shape[1], heads, kv_heads, D=dim, WIDTH=launching.next_power_of_2(dim), SIZE=PAGE,
        CODES=key_scale is not None, KEPT=kept is not None, **format_constants(E4M3),
        HARDWARE=has_hardware_casts(qkv.device), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return queries


def of_layer(cache: CacheTensors, layer: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """A layer's keys and values as kernels take them, codes as bytes, and their scales."""
    keys, values = cache.keys[layer], cache.values[layer]
    if cache.key_scale is None or cache.value_scale is None:
        return keys, values, None, None
    return keys.view(torch.uint8), values.view(torch.uint8), cache.key_scale[layer], cache.value_scale[layer]

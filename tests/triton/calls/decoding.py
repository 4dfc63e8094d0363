"""Generation: products of few rows with the sizes of an 8B model, the cache's store, attention."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from octavo.formats import BF16, E4M3, Format
from octavo.kernels.triton.attention import attend
from octavo.kernels.triton.cache import store
from octavo.kernels.triton.few_rows import few_rows
from octavo.numerics import PerRow, QuantizedTensor
from octavo.serving import PagedKVCache

HIDDEN, INNER = 4096, 14336
HEADS, KV_HEADS = 32, 8


def weight(rows: int, columns: int) -> QuantizedTensor:
    return QuantizedTensor(
        torch.empty(rows, columns, dtype=E4M3.torch_dtype), torch.empty(rows, 1), PerRow(), torch.float32
    )


def product(rows: int, dtype: torch.dtype, **options: Any) -> object:
    columns = INNER if "residual" in options else HIDDEN
    outputs = 2 * INNER if options.get("gated") else HIDDEN
    return few_rows(torch.empty(rows, columns, dtype=dtype), weight(outputs, columns), **options)


def storing(
    dim: int, fmt: Format, dtype: torch.dtype, *, heads: int = HEADS, kv_heads: int = KV_HEADS,
    positions: int = 4096, keeping: bool = False,
) -> object:  # fmt: skip
    cache = PagedKVCache(1, kv_heads, dim, max_positions=positions, fmt=fmt).tensors
    qkv, angles = torch.empty(1, (heads + 2 * kv_heads) * dim, dtype=dtype), torch.empty(8, dim)
    kept = torch.empty(1, 2, kv_heads, dim, dtype=torch.bfloat16) if keeping else None
    mean = torch.empty(kv_heads, dim)
    return store(qkv, cache, 0, cos=angles, sin=angles, key_mean=mean, sequence=ROW, position=ROW, kept=kept)


def attending(
    dim: int, fmt: Format, dtype: torch.dtype, *, heads: int = HEADS, kv_heads: int = KV_HEADS, positions: int = 4096
) -> object:
    cache = PagedKVCache(1, kv_heads, dim, max_positions=positions, fmt=fmt).tensors
    queries = torch.empty(1, heads, dim)
    return attend(queries, cache, 0, sequence=ROW, position=ROW, scale=0.1, out_dtype=dtype)


ROW = torch.zeros(1, dtype=torch.int64)
CALLS: dict[str, Callable[[], object]] = {
    "one row": partial(product, 1, torch.float32, norm=torch.empty(HIDDEN)),
    "one row, gated": partial(product, 1, torch.float32, norm=torch.empty(HIDDEN), gated=True),
    "one row, residual": partial(product, 1, torch.float32, residual=torch.empty(1, HIDDEN)),
}
for count in (16, 64):
    CALLS |= {
        f"{count} rows": partial(product, count, torch.bfloat16, norm=torch.empty(HIDDEN)),
        f"{count} rows, gated": partial(product, count, torch.bfloat16, gated=True),
        f"{count} rows, residual": partial(product, count, torch.float32, residual=torch.empty(count, HIDDEN)),
    }
for size in (64, 128):
    for held in (E4M3, BF16):
        own = torch.bfloat16 if held == BF16 else torch.float32
        CALLS[f"store {size} {held}"] = partial(storing, size, held, own)
        CALLS[f"attend {size} {held}"] = partial(attending, size, held, own)
CALLS |= {
    "store 128, rows that begin a text": partial(storing, 128, E4M3, torch.bfloat16, keeping=True),
    # The shorter a row of key heads, the more parts is a context read in.
    "attend 128, one key head, 65536 positions": partial(
        attending, 128, E4M3, torch.bfloat16, kv_heads=1, positions=65536
    ),
    "attend 64, two key heads, 32768 positions": partial(
        attending, 64, E4M3, torch.bfloat16, kv_heads=2, positions=32768
    ),
    # Numbers that are 1 are constants to the compiler, which must be content with them.
    "store 64, one head and one page": partial(storing, 64, E4M3, torch.bfloat16, heads=1, kv_heads=1, positions=1),
    "attend 64, one head and one page": partial(attending, 64, E4M3, torch.float32, heads=1, kv_heads=1, positions=1),
}
for count in (1, 16):
    CALLS[f"{count} rows by one"] = partial(
        few_rows, torch.empty(count, 64, dtype=torch.bfloat16), weight(1, 64), norm=torch.empty(64)
    )
    CALLS[f"{count} rows, K = 1"] = partial(few_rows, torch.empty(count, 1, dtype=torch.bfloat16), weight(64, 1))

"""Eight experts' products: rows of tokens ragged, K ragged, codes that are copied first, and a bias."""

from collections.abc import Callable
from functools import partial

import torch

from octavo.kernels.triton import gemm_each
from octavo.numerics import PerBlock, PerRow, PerTensor, QuantizedTensor
from tests.triton.calls.gemm import PAIRS, Pair, operand

COUNTS = (512, 1, 100, 1000, 16, 300, 700, 64)
N, K = 2048, 1024


def multiply(pair: Pair, tile: int, *, bias: bool = False) -> None:
    """Output: M is an expert's number of tokens."""
    a, b = [operand((m, K), pair[0]) for m in COUNTS], [operand((N, K), pair[1]) for _ in COUNTS]
    outs = [torch.empty(m, N, dtype=torch.bfloat16) for m in COUNTS]
    tiles, gemm_each.TILES = gemm_each.TILES, gemm_each.TILES[tile : tile + 1]
    gemm_each.product_each(a, b, outs, [torch.empty(N) for _ in COUNTS] if bias else None)
    gemm_each.TILES = tiles


def sum_over_tokens(pair: Pair) -> None:
    """Gradient of the weights: K is an expert's number of tokens, of which most are no multiple of 16."""
    a, b = ([operand((rows, k), groups) for k in COUNTS] for rows, groups in zip((N, K), pair, strict=True))
    gemm_each.product_each(a, b, [torch.empty(N, K) for _ in COUNTS])


def transposed(q: QuantizedTensor) -> QuantizedTensor:
    return QuantizedTensor(q.data.t(), q.scale, q.granularity, q.hp_dtype)


def product_of_transposed_views() -> None:
    a, b = ([transposed(operand((k, rows), PerTensor())) for k in COUNTS] for rows in (N, K))
    gemm_each.product_each(a, b, [torch.empty(N, K) for _ in COUNTS])


CALLS: dict[str, Callable[[], object]] = {
    f"{name}, tiles of {tile.rows}": partial(multiply, pair, number)
    for name, pair in PAIRS.items()
    for number, tile in enumerate(gemm_each.TILES)
}
CALLS |= {f"{name}, a sum over tokens": partial(sum_over_tokens, pair) for name, pair in PAIRS.items()}
CALLS |= {
    "by rows, with a bias": partial(multiply, (PerRow(), PerRow()), 0, bias=True),
    "1x128 by 128x128, with a bias": partial(multiply, (PerBlock(1, 128), PerBlock(128, 128)), 0, bias=True),
    "transposed views": product_of_transposed_views,
}

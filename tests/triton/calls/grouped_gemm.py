"""Eight experts, as tensorwise, rowwise and blockwise recipes quantize them."""

from collections.abc import Callable
from functools import partial

import torch

from octavo.kernels.triton import gemm, grouped_gemm
from octavo.numerics import PerBlock, PerRow
from tests.triton.calls.gemm import K, N, Pair, only, operand

PAIRS: dict[str, Pair] = {
    "1x128 by 128x128": (PerBlock(1, 128), PerBlock(128, 128)),
    "by rows": (PerRow(), PerRow()),
    "by rows and experts": (PerRow(), PerBlock(N, K)),
}


def multiply(pair: Pair, tile: gemm.Tile) -> None:
    x, weight = operand((4096, K), pair[0]), operand((8, N, K), pair[1])
    with only(tile):
        grouped_gemm.grouped_product(x, weight, torch.zeros(9, dtype=torch.int32), torch.bfloat16)


CALLS: dict[str, Callable[[], object]] = {
    f"{name}, tiles of {tile.halves} x {tile.rows}": partial(multiply, pair, tile)
    for name, pair in PAIRS.items()
    for tile in gemm.TILES
}
CALLS |= {  # sizes of 1 are constants to the compiler
    f"1 expert, {m} x {n} x {k}": partial(
        grouped_gemm.grouped_product,
        operand((m, k), PerRow()), operand((1, n, k), PerRow()), torch.zeros(2, dtype=torch.int32), torch.bfloat16,
    )
    for m, n, k in ((1, 1, 1), (1, 256, 256), (256, 1, 256), (256, 256, 1))
}  # fmt: skip

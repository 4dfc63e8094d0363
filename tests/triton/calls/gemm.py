"""What training multiplies: every pair of granularities by every tile, and gradients of FP32 weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from octavo.formats import E4M3, E5M2, Format
from octavo.kernels.triton import gemm
from octavo.numerics import Granularity, PerBlock, PerRow, QuantizedTensor
from octavo.numerics.accumulate import CHAIN

Pair = tuple[Granularity, Granularity]
PAIRS: dict[str, Pair] = {
    "1x128 by 128x128": (PerBlock(1, 128), PerBlock(128, 128)),
    "1x128 by 1x128": (PerBlock(1, 128), PerBlock(1, 128)),
    "1x32 by 1x32": (PerBlock(1, 32), PerBlock(1, 32)),
    "by rows": (PerRow(), PerRow()),
}
M, N, K = 4096, 2048, 1024


def operand(shape: tuple[int, ...], granularity: Granularity, fmt: Format = E4M3) -> QuantizedTensor:
    codes = torch.empty(shape, dtype=fmt.torch_dtype)
    scale = torch.empty(granularity.scale_shape(codes.shape))
    e8m0 = granularity == PerBlock(1, 32)
    return QuantizedTensor(codes, scale.to(torch.uint8) if e8m0 else scale, granularity, torch.bfloat16)


def multiply(pair: Pair, tile: gemm.Tile, out_dtype: torch.dtype, fmt: Format = E4M3) -> None:
    with only(tile):
        gemm.product(operand((M, K), pair[0], fmt), operand((N, K), pair[1]), torch.empty(N), out_dtype)


@contextmanager
def only(tile: gemm.Tile) -> Iterator[None]:
    tiles = gemm.TILES
    gemm.TILES = (tile,)
    try:
        yield
    finally:
        gemm.TILES = tiles


def fits(pair: Pair, tile: gemm.Tile) -> bool:
    return tile.halves == 1 or gemm.block_width(pair, K)[0] == CHAIN


CALLS: dict[str, Callable[[], object]] = {
    f"{name}, tiles of {tile.halves} x {tile.rows}": partial(multiply, pair, tile, torch.bfloat16)
    for name, pair in PAIRS.items()
    for tile in gemm.TILES
    if fits(pair, tile)
}
CALLS |= {  # sizes of 1 are constants to the compiler, which must be content with them
    f"{m} x {n} x {k}, {groups}": partial(
        gemm.product, operand((m, k), groups), operand((n, k), groups), None, torch.bfloat16
    )
    for groups in (PerRow(), PerBlock(1, 128))
    for m, n, k in ((1, 1, 1), (1, 256, 256), (256, 1, 256), (256, 256, 1))
}
CALLS |= {
    f"{name}, FP32": partial(multiply, pair, gemm.TILES[0], torch.float32, E5M2)
    for name, pair in PAIRS.items()
    if fits(pair, gemm.TILES[0])
}

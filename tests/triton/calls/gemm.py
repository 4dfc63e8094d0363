"""What training multiplies: every pair of granularities, every output dtype, small products and large ones."""

from collections.abc import Callable
from itertools import product

import torch

from octavo.formats import E4M3
from octavo.kernels.triton import gemm
from octavo.numerics import Granularity, PerBlock, PerRow, QuantizedTensor

GRANULARITIES = {
    "1x128 by 128x128": (PerBlock(1, 128), PerBlock(128, 128)),
    "1x128 by 1x128": (PerBlock(1, 128), PerBlock(1, 128)),
    "1x32 by 1x32": (PerBlock(1, 32), PerBlock(1, 32)),
    "by rows": (PerRow(), PerRow()),
}


def operand(rows: int, columns: int, granularity: Granularity, dtype: torch.dtype) -> QuantizedTensor:
    codes = torch.empty(rows, columns, dtype=dtype)
    scale = torch.empty(granularity.scale_shape(codes.shape)[::-1]).t()
    e8m0 = granularity == PerBlock(1, 32)
    return QuantizedTensor(codes, scale.to(torch.uint8) if e8m0 else scale, granularity, torch.bfloat16)


def multiply(pair: tuple[Granularity, Granularity], shape: tuple[int, int, int], out_dtype: torch.dtype) -> None:
    m, n, k = shape
    a, b = operand(m, k, pair[0], E4M3.torch_dtype), operand(n, k, pair[1], E4M3.torch_dtype)
    gemm.product(a, b, torch.empty(n), out_dtype)


CALLS: dict[str, Callable[[], object]] = {
    f"{name}, {shape[0]} rows, {dtype}": (lambda pair=pair, shape=shape, dtype=dtype: multiply(pair, shape, dtype))
    for (name, pair), shape, dtype in product(
        GRANULARITIES.items(), ((4096, 4096, 4096), (1024, 512, 4096), (16, 512, 4096)), (torch.bfloat16, torch.float32)
    )
}

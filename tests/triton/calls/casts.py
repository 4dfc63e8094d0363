"""Casts as a training step makes them: matrices of bfloat16, and of FP32 for master weights."""

from collections.abc import Callable
from functools import partial

import torch

from octavo.formats import E4M3, E5M2
from octavo.kernels.triton import blocks, casts, rows, values
from octavo.numerics import AmaxRecord, CastSpec, PerBlock, PerRow, ScaleRounding

_E4M3, _E5M2 = CastSpec(format=E4M3), CastSpec(format=E5M2)
_ROWS = CastSpec(format=E4M3, granularity=PerRow(), scale_rounding=ScaleRounding.RCEIL)
_x, _master = torch.empty(1024, 4096, dtype=torch.bfloat16), torch.empty(1024, 4096)
_long = torch.empty(64, 16384, dtype=torch.bfloat16)
_amax = torch.ones(())
_history = AmaxRecord(torch.ones(()), torch.zeros((), dtype=torch.bool), torch.zeros((), dtype=torch.int64))
_counts = AmaxRecord(nonfinite=_history.nonfinite)
_codes = torch.empty(1024, 4096, dtype=torch.float8_e4m3fn)
_random = torch.empty(1024, 4096, dtype=torch.int32)
_number, _three = torch.empty(1, 1), torch.empty(1, 3)  # fewer than the numbers that a thread converts at once
_one, _row_scales, _tile_scales = torch.ones(1, 1), torch.ones(1024, 1), torch.ones(1024, 32)


def _blocks(rows: int, columns: int) -> CastSpec:
    return CastSpec(format=E4M3, granularity=PerBlock(rows, columns), scale_rounding=ScaleRounding.RCEIL)


CALLS: dict[str, Callable[[], object]] = {
    "tensor": partial(casts.cast_tensor, _x, _E4M3),
    "tensor both ways": partial(casts.cast_tensor, _x, _E4M3, transposed=True, record=_counts),
    "tensor both ways, E5M2": partial(casts.cast_tensor, _x, _E5M2, transposed=True),
    "tensor both ways, FP32": partial(casts.cast_tensor, _master, _E4M3, transposed=True),
    "tensor both ways, 256 x 272, FP32": partial(casts.cast_tensor, torch.empty(256, 272), _E4M3, transposed=True),
    "tensor both ways, 272 x 300, FP32": partial(casts.cast_tensor, torch.empty(272, 300), _E4M3, transposed=True),
    "tensor both ways, 305 x 256": partial(casts.cast_tensor, _x[:305, :256].contiguous(), _E4M3, transposed=True),
    "delayed both ways": partial(
        casts.cast_tensor, _x, _E4M3, amax=_amax, measure_if_zero=True, transposed=True, record=_history
    ),
    "static": partial(casts.cast_tensor, _x, _E4M3, scale=_amax),
    "static, measuring": partial(casts.cast_tensor, _x, _E4M3, scale=_amax, record=_counts),
    "static, counting": partial(casts.cast_tensor, _x, _E4M3, scale=_amax, counting=True),
    "tensor in place": partial(casts.cast_tensor, _x, _E4M3, values=_x),
    "tensor, 1 x 1": partial(casts.cast_tensor, _number, _E4M3),
    "tensor, 1 x 3": partial(casts.cast_tensor, _three, _E4M3),
    "tensor, 1 x 1 in place": partial(casts.cast_tensor, _number, _E5M2, values=_number),
    "rows": partial(rows.cast_rows, _x, _ROWS, record=_counts),
    "rows, 1 x 1": partial(rows.cast_rows, _number, _ROWS),
    "rows, 1 x 1 in place": partial(rows.cast_rows, _number, _ROWS, values=_number),
    "rows, 5 x 1": partial(rows.cast_rows, torch.empty(5, 1), _ROWS),
    "rows of 16384": partial(rows.cast_rows, _long, _ROWS),
    "rows, FP32": partial(rows.cast_rows, _master, _ROWS),
    "rows in place": partial(rows.cast_rows, _x, _ROWS, values=_x),
    "rows and columns": partial(rows.cast_rows, _x, _ROWS, transposed=True, record=_counts),
    "rows and columns, FP32": partial(rows.cast_rows, _master, _ROWS, transposed=True),
    "1 x 128": partial(blocks.cast_blocks, _x, _blocks(1, 128)),
    "1 x 128 both ways": partial(blocks.cast_blocks, _x, _blocks(1, 128), transposed=True, record=_counts),
    "1 x 128 both ways, FP32": partial(blocks.cast_blocks, _master, _blocks(1, 128), transposed=True, record=_counts),
    "1 x 128, FP32": partial(blocks.cast_blocks, _master, _blocks(1, 128)),
    "128 x 128 both ways": partial(blocks.cast_blocks, _x, _blocks(128, 128), transposed=True, record=_counts),
    "128 x 128": partial(blocks.cast_blocks, _x, _blocks(128, 128)),
    "1 x 32": partial(blocks.cast_blocks, _x, _blocks(1, 32)),
    "1 x 32 both ways": partial(blocks.cast_blocks, _x, _blocks(1, 32), transposed=True),
    "4 x 2 both ways": partial(blocks.cast_blocks, _x, _blocks(4, 2), transposed=True, record=_counts),
    "2 x 8": partial(blocks.cast_blocks, _x, _blocks(2, 8), record=_counts),
    "dequantize, tensor": partial(values.dequantize, _codes, _one, (0, 0), E4M3, torch.bfloat16),
    "dequantize, rows": partial(values.dequantize, _codes, _row_scales, (1, 0), E4M3, torch.bfloat16),
    "dequantize, 1 x 128": partial(values.dequantize, _codes, _tile_scales, (1, 128), E4M3, torch.bfloat16),
    "stochastic": partial(values.round_stochastic, _master, _random, E4M3),
    "random bits": partial(values.random_bits, torch.zeros((), dtype=torch.int64), 1 << 20),
    "1 x 128 in place": partial(blocks.cast_blocks, _x, _blocks(1, 128), values=_x),
}

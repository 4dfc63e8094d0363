"""Casts as a training step makes them: matrices of bfloat16, and of FP32 for master weights."""

from collections.abc import Callable
from functools import partial

import torch

from octavo.formats import E4M3, E5M2
from octavo.kernels.cpu import ScaleRule
from octavo.kernels.triton import blocks, casts, rows
from octavo.numerics import ScaleRounding

_FP32 = ScaleRule(ScaleRounding.FP32, 1e-12, 0)
_POWERS = ScaleRule(ScaleRounding.RCEIL, 1e-12, 0)
_x, _master = torch.empty(1024, 4096, dtype=torch.bfloat16), torch.empty(1024, 4096)
_long = torch.empty(64, 16384, dtype=torch.bfloat16)
_amax = torch.ones(())

CALLS: dict[str, Callable[[], object]] = {
    "tensor": partial(casts.cast_tensor, _x, E4M3, _FP32),
    "tensor both ways": partial(casts.cast_tensor, _x, E4M3, _FP32, flipped=True),
    "tensor both ways, E5M2": partial(casts.cast_tensor, _x, E5M2, _FP32, flipped=True),
    "tensor both ways, FP32": partial(casts.cast_tensor, _master, E4M3, _FP32, flipped=True),
    "delayed both ways": partial(casts.cast_tensor, _x, E4M3, _FP32, amax=_amax, zero_is_unknown=True, flipped=True),
    "static": partial(casts.cast_tensor, _x, E4M3, _FP32, scale=_amax),
    "static, counting": partial(casts.cast_tensor, _x, E4M3, _FP32, scale=_amax, counting=True),
    "tensor in place": partial(casts.cast_tensor, _x, E4M3, _FP32, values=_x),
    "rows": partial(rows.cast_rows, _x, E4M3, _POWERS),
    "rows of 16384": partial(rows.cast_rows, _long, E4M3, _POWERS),
    "rows, FP32": partial(rows.cast_rows, _master, E4M3, _POWERS),
    "rows in place": partial(rows.cast_rows, _x, E4M3, _POWERS, values=_x),
    "rows and columns": partial(rows.cast_rows, _x, E4M3, _POWERS, flipped=True),
    "rows and columns, FP32": partial(rows.cast_rows, _master, E4M3, _POWERS, flipped=True),
    "1 x 128": partial(blocks.cast_blocks, _x, E4M3, _POWERS, (1, 128)),
    "1 x 128 both ways": partial(blocks.cast_blocks, _x, E4M3, _POWERS, (1, 128), flipped=True),
    "1 x 128 both ways, FP32": partial(blocks.cast_blocks, _master, E4M3, _FP32, (1, 128), flipped=True),
    "128 x 128 both ways": partial(blocks.cast_blocks, _x, E4M3, _POWERS, (128, 128), flipped=True),
    "1 x 32 both ways": partial(blocks.cast_blocks, _x, E4M3, _POWERS, (1, 32), flipped=True),
    "1 x 128 in place": partial(blocks.cast_blocks, _x, E4M3, _POWERS, (1, 128), values=_x),
}

"""Norms with the cast of their result, and their backward."""

from dataclasses import replace

import torch

from octavo.formats import E4M3, E8M0
from octavo.kernels import fused_casts
from octavo.kernels.result_cast import NormSpec, ResultCast
from octavo.numerics import CastSpec, PerBlock, PerRow, ScaleRounding

ROWS, COLUMNS = 8192, 4096
TENSOR = ResultCast(spec=CastSpec(format=E4M3), transpose=True)
ROW = ResultCast(spec=CastSpec(format=E4M3, granularity=PerRow(), scale_rounding=ScaleRounding.RCEIL), transpose=True)
BLOCK = ResultCast(
    spec=CastSpec(format=E4M3, granularity=PerBlock(1, 128), scale_rounding=ScaleRounding.RCEIL), transpose=True
)
MX = ResultCast(
    spec=CastSpec(format=E4M3, granularity=PerBlock(1, 32), scale_rounding=ScaleRounding.RCEIL, scale_format=E8M0),
    transpose=True,
)


def _rms(cast: ResultCast, columns: int = COLUMNS, dtype: torch.dtype = torch.bfloat16, amax: bool = False):
    spec = NormSpec(layer=False, eps=1e-5, zero_centered=False)
    x, gain = torch.empty(64, columns, dtype=dtype), torch.empty(columns)
    return fused_casts.cast_norm(
        x, gain, None, spec, cast, result_dtype=torch.bfloat16, amax=torch.ones(()) if amax else None
    )


def _layer(cast: ResultCast, columns: int = COLUMNS):
    spec = NormSpec(layer=True, eps=1e-5, zero_centered=True)
    x, gain = torch.empty(64, columns, dtype=torch.bfloat16), torch.empty(columns, dtype=torch.bfloat16)
    return fused_casts.cast_norm(x, gain, gain, spec, cast, result_dtype=torch.bfloat16)


def _backward(columns: int, layer: bool, dtype: torch.dtype = torch.bfloat16):
    spec = NormSpec(layer=layer, eps=1e-5, zero_centered=False)
    x, gain, rstd = torch.empty(64, columns, dtype=dtype), torch.empty(columns), torch.empty(64)
    return fused_casts.norm_backward(x, x, gain, rstd, rstd, spec, has_bias=layer)


CALLS = {
    "rmsnorm, tensorwise": lambda: _rms(TENSOR),
    "rmsnorm, blockwise, transpose": lambda: _rms(replace(BLOCK, direct=False)),
    "rmsnorm, rowwise, transpose": lambda: _rms(replace(ROW, direct=False)),
    "rmsnorm, tensorwise, fp32": lambda: _rms(TENSOR, dtype=torch.float32),
    "rmsnorm, delayed": lambda: _rms(TENSOR, amax=True),
    "rmsnorm, rowwise": lambda: _rms(ROW),
    "rmsnorm, rowwise, 16384": lambda: _rms(ROW, 16384),
    "rmsnorm, rowwise, 2": lambda: _rms(ROW, 2),
    "rmsnorm, blockwise": lambda: _rms(BLOCK),
    "rmsnorm, mxfp8": lambda: _rms(MX),
    "layernorm, tensorwise": lambda: _layer(TENSOR),
    "layernorm, rowwise, 8192": lambda: _layer(ROW, 8192),
    "rmsnorm backward": lambda: _backward(COLUMNS, layer=False),
    "rmsnorm backward, 16384": lambda: _backward(16384, layer=False),
    "layernorm backward": lambda: _backward(COLUMNS, layer=True),
    "layernorm backward, 8192": lambda: _backward(8192, layer=True),
}

"""Activations with the cast of their result, and their backward."""

from dataclasses import replace

import torch

from octavo.kernels import fused_casts
from octavo.kernels.result_cast import ResultCast
from tests.triton.calls.norms import BLOCK, MX, ROW, TENSOR

WIDTH = 14336


def _cast(function: str, cast: ResultCast, amax: bool = False, dtype: torch.dtype = torch.bfloat16, width: int = WIDTH):
    x = torch.empty(64, 2 * width, dtype=dtype)
    return fused_casts.cast_activation(x, function, cast, gated=True, amax=torch.ones(()) if amax else None)


def _backward(function: str, gated: bool):
    x = torch.empty(64, 2 * WIDTH if gated else WIDTH, dtype=torch.bfloat16)
    return fused_casts.activation_backward(x[:, :WIDTH].contiguous(), x, function, gated=gated)


CALLS = {
    "swiglu, tensorwise": lambda: _cast("silu", TENSOR),
    "swiglu, delayed": lambda: _cast("silu", TENSOR, amax=True),
    "swiglu, rowwise": lambda: _cast("silu", ROW),
    "swiglu, rowwise, fp32": lambda: _cast("silu", ROW, dtype=torch.float32),
    "swiglu, rowwise, 2": lambda: _cast("silu", ROW, width=2),
    "swiglu, blockwise": lambda: _cast("silu", BLOCK),
    "swiglu, tensorwise, transpose": lambda: _cast("silu", replace(TENSOR, direct=False), amax=True),
    "swiglu, rowwise, transpose": lambda: _cast("silu", replace(ROW, direct=False)),
    "swiglu, blockwise, transpose": lambda: _cast("silu", replace(BLOCK, direct=False)),
    "swiglu, mxfp8, transpose": lambda: _cast("silu", replace(MX, direct=False)),
    "swiglu, mxfp8": lambda: _cast("silu", MX),
    "geglu, tensorwise": lambda: _cast("gelu", TENSOR),
    "geglu_tanh, rowwise": lambda: _cast("gelu_tanh", ROW),
    "swiglu backward": lambda: _backward("silu", gated=True),
    "gelu backward": lambda: _backward("gelu", gated=False),
    "geglu_tanh backward": lambda: _backward("gelu_tanh", gated=True),
}

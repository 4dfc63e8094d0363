"""Codes back to values, and stochastic rounding: one reading, one writing, every element by itself.

| call             | bytes read an element | bytes written            |
|------------------|-----------------------|--------------------------|
| dequantize       | 1, and its scale      | the size of the value    |
| round_stochastic | 8                     | 1                        |
| random_bits      | 0                     | 4                        |
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import Format
from octavo.kernels.triton import launching
from octavo.kernels.triton.casts import ceil_div, first_of_tile
from octavo.kernels.triton.codes import has_hardware_casts, number_from_code

__all__ = ["dequantize", "random_bits", "round_stochastic"]

_ELEMENTS = 4096


@triton.jit
def dequantize_kernel(
    x, scales, out, rows, columns, stride, scale_stride_rows, scale_stride_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Blocks of ROWS x COLUMNS share a scale; 0 is a whole column or row of them."""
    row, column = first_of_tile(tl.program_id(0), columns, BLOCK_ROWS, BLOCK_COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    found = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0)
    group_rows: tl.constexpr = BLOCK_ROWS // ROWS if ROWS else 1
    group_columns: tl.constexpr = BLOCK_COLUMNS // COLUMNS if COLUMNS else 1
    across = ceil_div(columns, BLOCK_COLUMNS)
    down, along = tl.program_id(0) // across * group_rows, tl.program_id(0) % across * group_columns
    group_row = (down if ROWS else 0) + tl.arange(0, group_rows)[:, None]
    group_column = (along if COLUMNS else 0) + tl.arange(0, group_columns)[None, :]
    last_row = (ceil_div(rows, ROWS) if ROWS else 1) - 1
    last_column = (ceil_div(columns, COLUMNS) if COLUMNS else 1) - 1
    at = tl.minimum(group_row, last_row).to(tl.int64) * scale_stride_rows
    at += tl.minimum(group_column, last_column) * scale_stride_columns
    scale = tl.broadcast_to(
        tl.load(scales + at)[:, None, :, None],
        (group_rows, BLOCK_ROWS // group_rows, group_columns, BLOCK_COLUMNS // group_columns),
    )
    value = number_from_code(found, MANTISSA, HARDWARE) * tl.reshape(scale, (BLOCK_ROWS, BLOCK_COLUMNS))
    tl.store(out + row[:, None] * columns + column[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def round_stochastic_kernel(
    x, random, out, count, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """numerics.cast's rule in integers: the fraction in 2^-20 of a step, the random one added, the rest cut."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    number = tl.load(x + at, mask=at < count, other=0.0)
    drawn = tl.load(random + at, mask=at < count, other=0)
    bits = number.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFF_FFFF
    exponent = (magnitude >> 23) - 127
    whole = tl.where(magnitude >= (1 << 23), (magnitude & 0x7F_FFFF) | (1 << 23), magnitude & 0x7F_FFFF)
    lowest: tl.constexpr = 1 - BIAS  # the exponent that subnormals share
    above = tl.maximum(exponent - lowest, 0)
    steps = whole >> tl.minimum(3 - MANTISSA + tl.maximum(lowest - tl.maximum(exponent, -126), 0), 31)
    code = (above << MANTISSA) + ((steps + drawn) >> 20)
    infinite: tl.constexpr = 0x7F if MANTISSA == 3 else 0x7C
    code = tl.where(magnitude >= 0x7F80_0000, tl.where(magnitude == 0x7F80_0000, infinite, 0x7F), code)
    tl.store(out + at, (code | ((bits >> 24) & 0x80)).to(tl.uint8), mask=at < count)


@triton.jit
def random_bits_kernel(seed, out, count, SIZE: tl.constexpr):
    """Four numbers a counter: element i is number i % 4 of counter i // 4."""
    first = tl.program_id(0).to(tl.int64) * SIZE
    counter = first + tl.arange(0, SIZE)
    low, high = (counter & 0xFFFF_FFFF).to(tl.uint32), (counter >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(tl.load(seed), low, high, low * 0, low * 0)
    drawn = tl.interleave(tl.interleave(a, c), tl.interleave(b, d)).to(tl.int32, bitcast=True)
    at = first * 4 + tl.arange(0, SIZE * 4)
    tl.store(out + at, drawn, mask=at < count)


def dequantize(matrix: Tensor, scale: Tensor, block: tuple[int, int], fmt: Format, out_dtype: torch.dtype) -> Tensor:
    """``fp32(codes) · scale``, rounded once to ``out_dtype``.

    Args:
        matrix: [M, K] codes, not empty, their columns side by side.
        scale: float32, a number for each block, [blocks down, blocks across].
        block: rows and columns of a block, powers of two up to 128; 0 stands for all of them.
        fmt: E4M3 or E5M2.
        out_dtype: float32, bfloat16 or float16.
    """
    rows, columns = matrix.shape
    out = torch.empty(rows, columns, dtype=out_dtype, device=matrix.device)
    block_rows, block_columns = max(32, block[0]), 128
    launching.launch(
        dequantize_kernel, (launching.ceil_div(rows, block_rows) * launching.ceil_div(columns, block_columns),),
        matrix.view(torch.uint8), scale, out, rows, columns, matrix.stride(0), *scale.stride(),
        ROWS=block[0], COLUMNS=block[1], MANTISSA=fmt.mantissa_bits, HARDWARE=has_hardware_casts(matrix.device),
        BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, num_warps=4 if block_rows == 32 else 8,
    )  # fmt: skip
    return out


def round_stochastic(scaled: Tensor, random: Tensor, fmt: Format) -> Tensor:
    """Codes of numbers, rounded up in magnitude where the dropped fraction and a random one together make 1.

    Args:
        scaled: float32, contiguous, finite ones within ±maximum.
        random: int32 from 0 to 2²⁰ - 1, contiguous, shaped like ``scaled``.
        fmt: E4M3 or E5M2.
    """
    out = torch.empty(scaled.shape, dtype=torch.uint8, device=scaled.device)
    launching.launch(
        round_stochastic_kernel,
        (launching.ceil_div(scaled.numel(), _ELEMENTS),),
        scaled,
        random,
        out,
        scaled.numel(),
        MANTISSA=fmt.mantissa_bits,
        BIAS=fmt.bias,
        SIZE=_ELEMENTS,
        num_warps=8,
    )
    return out.view(fmt.torch_dtype)


def random_bits(seed: Tensor, count: int) -> Tensor:
    """:func:`octavo.numerics.random_bits.random_bits`: int32 [count] of ``seed``, an int64 [] on the device."""
    out = torch.empty(count, dtype=torch.int32, device=seed.device)
    launching.launch(
        random_bits_kernel, (launching.ceil_div(count, _ELEMENTS),), seed, out, count, SIZE=_ELEMENTS // 4, num_warps=8
    )
    return out

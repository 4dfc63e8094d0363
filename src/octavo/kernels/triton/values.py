"""Codes back to values, stochastic rounding and its random bits: elementwise, one read, one write.

    value = round(number(code) · scale)                                 dequantize
    code  = trunc(|scaled| / step + random / 2^20), with scaled's sign   round_stochastic; step is the code's spacing
    word  = Philox-4x32-10(counter i // 4, key seed)[i % 4]              random_bits

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

_ELEMENTS = 4096  # of a program with 8 warps: 16 a thread


@triton.jit
def dequantize_kernel(
    x,  # uint8 codes [rows, columns] row-major, `stride` from row to row
    scales,  # float32 [⌈rows / ROWS⌉, ⌈columns / COLUMNS⌉] with any two strides, so transposed views too
    out,  # values [rows, columns] row-major, without gaps
    rows, columns, stride, scale_stride_rows, scale_stride_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """out[r, c] = round(number(x[r, c]) · scales[r // ROWS, c // COLUMNS]).

    ROWS x COLUMNS elements share a scale; 0 stands for all rows or all columns. A program owns a tile [BLOCK_ROWS,
    BLOCK_COLUMNS], of which ROWS and COLUMNS are divisors: it loads each scale once and broadcasts it in registers.
    """
    row, column = first_of_tile(tl.program_id(0), columns, BLOCK_ROWS, BLOCK_COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    codes = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0)
    # The tile's own scaling groups: [group_rows, group_columns], from (down, along) on.
    group_rows: tl.constexpr = BLOCK_ROWS // ROWS if ROWS else 1
    group_columns: tl.constexpr = BLOCK_COLUMNS // COLUMNS if COLUMNS else 1
    across = ceil_div(columns, BLOCK_COLUMNS)
    down, along = tl.program_id(0) // across * group_rows, tl.program_id(0) % across * group_columns
    group_row = (down if ROWS else 0) + tl.arange(0, group_rows)[:, None]
    group_column = (along if COLUMNS else 0) + tl.arange(0, group_columns)[None, :]
    # Groups beyond the matrix read the last one's scale: limiting two indices needs no mask for every scale, and
    # elements there are not stored.
    last_row = (ceil_div(rows, ROWS) if ROWS else 1) - 1
    last_column = (ceil_div(columns, COLUMNS) if COLUMNS else 1) - 1
    at = tl.minimum(group_row, last_row).to(tl.int64) * scale_stride_rows
    at += tl.minimum(group_column, last_column) * scale_stride_columns
    scale = tl.broadcast_to(
        tl.load(scales + at)[:, None, :, None],
        (group_rows, BLOCK_ROWS // group_rows, group_columns, BLOCK_COLUMNS // group_columns),
    )
    value = number_from_code(codes, MANTISSA, HARDWARE) * tl.reshape(scale, (BLOCK_ROWS, BLOCK_COLUMNS))
    tl.store(out + row[:, None] * columns + column[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def round_stochastic_kernel(
    x,  # float32 [count], finite ones within ±maximum
    random,  # int32 [count], from 0 to 2^20 - 1
    out,  # uint8 codes [count]
    count, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Round stochastically: code = (|x| in units of 2^-20 of the format's step + random) >> 20, with x's sign.

    numerics.cast's rule, in integers: FP32 arithmetic would round the sum of step and fraction. A program owns SIZE
    elements.
    """
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    number = tl.load(x + at, mask=at < count, other=0.0)
    random_fraction = tl.load(random + at, mask=at < count, other=0)
    bits = number.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFF_FFFF
    exponent = (magnitude >> 23) - 127
    # The significand, 1.fraction · 2^23; without the leading 1 where x is subnormal.
    significand = tl.where(magnitude >= (1 << 23), (magnitude & 0x7F_FFFF) | (1 << 23), magnitude & 0x7F_FFFF)
    lowest: tl.constexpr = 1 - BIAS  # the exponent that subnormals share
    above = tl.maximum(exponent - lowest, 0)
    # In units of 2^-20 of a step: the significand's own unit is that for E4M3, half of it for E5M2. Below `lowest` the
    # step no longer shrinks with the exponent. A shift by 32 and more is undefined; one by 31 leaves 0.
    steps = significand >> tl.minimum(3 - MANTISSA + tl.maximum(lowest - tl.maximum(exponent, -126), 0), 31)
    # The leading 1 is part of `steps` and adds one to the exponent field of normal codes, which `above` leaves out.
    code = (above << MANTISSA) + ((steps + random_fraction) >> 20)
    infinite: tl.constexpr = 0x7F if MANTISSA == 3 else 0x7C  # E4M3 has no infinity: NaN
    code = tl.where(magnitude >= 0x7F80_0000, tl.where(magnitude == 0x7F80_0000, infinite, 0x7F), code)
    tl.store(out + at, (code | ((bits >> 24) & 0x80)).to(tl.uint8), mask=at < count)  # FP32's sign, moved from bit 31


@triton.jit
def random_bits_kernel(
    seed,  # int64, one element, on the device: a generator there is read without a wait
    out,  # int32 [count]
    count, SIZE: tl.constexpr
):  # fmt: skip
    """Philox-4x32-10 with the seed as key: element i is word i % 4 of counter i // 4, see numerics.random_bits.

    A program owns SIZE counters, so 4 · SIZE elements; there is no state, so it needs no other program.
    """
    first = tl.program_id(0).to(tl.int64) * SIZE
    counter = first + tl.arange(0, SIZE)
    low, high = (counter & 0xFFFF_FFFF).to(tl.uint32), (counter >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(tl.load(seed), low, high, low * 0, low * 0)
    # a0 b0 c0 d0 a1 ...: the inner pairs are (a, c) and (b, d), since the outer interleave alternates between them.
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d)).to(tl.int32, bitcast=True)
    at = first * 4 + tl.arange(0, SIZE * 4)
    tl.store(out + at, words, mask=at < count)


def dequantize(matrix: Tensor, scale: Tensor, block: tuple[int, int], fmt: Format, out_dtype: torch.dtype) -> Tensor:
    """Decode ``fp32(codes) · scale``, rounded once to ``out_dtype``.

    Args:
        matrix: [M, K] codes, not empty, their columns side by side.
        scale: float32, a number for each block, [blocks down, blocks across].
        block: rows and columns of a block, powers of two up to 128; 0 stands for all of them.
        fmt: E4M3 or E5M2.
        out_dtype: float32, bfloat16 or float16.
    """
    rows, columns = matrix.shape
    out = torch.empty(rows, columns, dtype=out_dtype, device=matrix.device)
    block_rows, block_columns = max(32, block[0]), 128  # 128: a line of memory, and a multiple of every block's columns
    launching.launch(
        dequantize_kernel, (launching.ceil_div(rows, block_rows) * launching.ceil_div(columns, block_columns),),
        matrix.view(torch.uint8), scale, out, rows, columns, matrix.stride(0), *scale.stride(),
        ROWS=block[0], COLUMNS=block[1], MANTISSA=fmt.mantissa_bits, HARDWARE=has_hardware_casts(matrix.device),
        BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, num_warps=4 if block_rows == 32 else 8,
    )  # fmt: skip
    return out


def round_stochastic(scaled: Tensor, random: Tensor, fmt: Format) -> Tensor:
    """Round numbers to codes, up in magnitude where the dropped fraction and a random one add up to 1 or more.

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
    """Random words, int32 [count], of ``seed``, an int64 [] on the device: see :mod:`octavo.numerics.random_bits`."""
    out = torch.empty(count, dtype=torch.int32, device=seed.device)
    launching.launch(
        random_bits_kernel, (launching.ceil_div(count, _ELEMENTS),), seed, out, count, SIZE=_ELEMENTS // 4, num_warps=8
    )
    return out

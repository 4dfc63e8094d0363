"""Blockwise casts: a scale for every ROWS x COLUMNS elements of a matrix, of its transpose, or of both.

    codes[block] = RNE(fp32(x[block]) · encode),  encode = MAX / max |x[block]|,  scale[block] = 1 / encode

A block lies inside a tile of 32 x 128, 64 x 64 or 128 x 128, so one program measures it and casts it in one reading.
A block of the transpose is COLUMNS x ROWS elements of the matrix; square blocks hold the same elements in both orders,
so their codes are computed once.

| call                  | launches | bytes read | bytes written                               |
|-----------------------|----------|------------|---------------------------------------------|
| one order             | 1        | size of x  | 1 an element, 8 a block                     |
| both                  | 1        | size of x  | 2 an element, 8 a block of either           |
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import casts, launching
from octavo.kernels.triton.casts import (
    OrientedCast,
    any_nonfinite,
    as_stored,
    ceil_div,
    codes_of,
    first_of_tile,
    is_nonfinite,
    max_magnitude,
    record_nonfinite,
    zero_nonfinite,
)
from octavo.kernels.triton.codes import encode_scale_from_amax, number_from_code, reciprocal
from octavo.numerics import AmaxRecord, CastSpec, PerBlock

__all__ = ["LARGEST", "cast_blocks"]

LARGEST = 128  # rows and columns of a block; both are powers of two


@triton.jit
def _block_amaxes(blocks):
    """The largest magnitude of each of blocks [down, rows, across, columns], [down, across]."""
    return max_magnitude(max_magnitude(blocks, 3), 1)


@triton.jit
def _amaxes(blocks, overflowed, nonfinite):
    """The finite amax of each of blocks [down, rows, across, columns], [down, across]; records NaN and ±Inf."""
    amax = _block_amaxes(blocks)
    if any_nonfinite(amax):  # elements are masked and counted only if a maximum says that one of them is not finite
        record_nonfinite(overflowed, nonfinite, is_nonfinite(blocks))
        amax = _block_amaxes(zero_nonfinite(blocks))
    return amax


@triton.jit
def _tile_in(codes, memory, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """Blocks of codes reshaped to the tile [DOWN, ACROSS], in the dtype of the memory to store to."""
    return as_stored(tl.reshape(codes, (DOWN, ACROSS)), memory)


@triton.jit
def cast_blocks_kernel(
    x,  # [rows, columns] row-major, `stride` elements from row to row
    # Of an order that is not written, codes, scales and amaxes are None.
    out,  # codes, or values in x's dtype: [rows, columns] row-major, `out_stride` from row to row; may be x itself
    transposed,  # codes of the transpose: [columns, rows] row-major, without gaps
    scales, amaxes,  # float32 [⌈rows / ROWS⌉, ⌈columns / COLUMNS⌉] row-major
    transposed_scales, transposed_amaxes,  # float32 [⌈columns / ROWS⌉, ⌈rows / COLUMNS⌉] row-major: of the transpose
    overflowed, nonfinite,  # uint8 and int64, one element each, or None: raised
    rows, columns, stride, out_stride,
    DIRECT: tl.constexpr, TRANSPOSED: tl.constexpr, VALUES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,  # of a block
    MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, ROUNDING: tl.constexpr, FLOOR: tl.constexpr,
    MARGIN: tl.constexpr, PROPAGATE: tl.constexpr, HARDWARE: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr,  # of a tile: both are multiples of ROWS and of COLUMNS
):  # fmt: skip
    """Cast all blocks of a tile; with VALUES, codes · scale instead of codes.

    A program owns a tile [DOWN, ACROSS] with all blocks of both orders inside it: no block is split between programs.
    Reads x once, writes a byte an element for each order; with VALUES, x's size once.
    """
    # In FP32 from here on. Beyond the matrix x is 0, which raises no amax: a ragged block has that of its elements.
    row, column = first_of_tile(tl.program_id(0), columns, DOWN, ACROSS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    number = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    across = ceil_div(columns, ACROSS)
    first_row, first_column = tl.program_id(0) // across * DOWN, tl.program_id(0) % across * ACROSS
    if DIRECT or ROWS == COLUMNS:  # square blocks: the codes of the transpose are these, transposed
        blocks = tl.reshape(number, (DOWN // ROWS, ROWS, ACROSS // COLUMNS, COLUMNS))
        amax = _amaxes(blocks, overflowed, nonfinite)
        encode = encode_scale_from_amax(amax, MAX, MANTISSA, ROUNDING, FLOOR, MARGIN)
        decode = reciprocal(encode)
        block_row = first_row // ROWS + tl.arange(0, DOWN // ROWS)[:, None]
        block_column = first_column // COLUMNS + tl.arange(0, ACROSS // COLUMNS)[None, :]
        blocks_down, blocks_across = ceil_div(rows, ROWS), ceil_div(columns, COLUMNS)
        at = block_row.to(tl.int64) * blocks_across + block_column
        within = (block_row < blocks_down) & (block_column < blocks_across)  # a tile may hold whole blocks beyond x
        codes = codes_of(blocks, encode[:, None, :, None], MAX, MANTISSA, BIAS, PROPAGATE, HARDWARE)
        if DIRECT:
            tl.store(scales + at, decode, mask=within)
            tl.store(amaxes + at, amax, mask=within)
        if VALUES:
            value = number_from_code(codes, MANTISSA, HARDWARE) * decode[:, None, :, None]
            value = tl.reshape(value, (DOWN, ACROSS))
            tl.store(out + row[:, None] * out_stride + column[None, :], value.to(out.dtype.element_ty), mask=inside)
        elif DIRECT:
            tl.store(out + row[:, None] * out_stride + column[None, :], _tile_in(codes, out, DOWN, ACROSS), mask=inside)
    if TRANSPOSED:
        if ROWS != COLUMNS:  # other elements share a scale in the transpose: measure and cast again, from registers
            blocks = tl.reshape(number, (DOWN // COLUMNS, COLUMNS, ACROSS // ROWS, ROWS))
            if DIRECT:  # which has recorded NaN and ±Inf: twice would count them twice
                amax = _amaxes(blocks, None, None)
            else:
                amax = _amaxes(blocks, overflowed, nonfinite)
            encode = encode_scale_from_amax(amax, MAX, MANTISSA, ROUNDING, FLOOR, MARGIN)
            decode = reciprocal(encode)
            codes = codes_of(blocks, encode[:, None, :, None], MAX, MANTISSA, BIAS, PROPAGATE, HARDWARE)
        group_row = first_row // COLUMNS + tl.arange(0, DOWN // COLUMNS)[:, None]  # blocks of the transpose, as x lies
        group_column = first_column // ROWS + tl.arange(0, ACROSS // ROWS)[None, :]
        groups_down, groups_across = ceil_div(rows, COLUMNS), ceil_div(columns, ROWS)
        place = group_column.to(tl.int64) * groups_down + group_row  # transposed by the address
        within = (group_row < groups_down) & (group_column < groups_across)
        tl.store(transposed_scales + place, decode, mask=within)
        tl.store(transposed_amaxes + place, amax, mask=within)
        inside_t = (column < columns)[:, None] & (row < rows)[None, :]
        codes = tl.trans(_tile_in(codes, transposed, DOWN, ACROSS))  # threads exchange bytes, not FP32 numbers
        tl.store(transposed + column[:, None] * rows + row[None, :], codes, mask=inside_t)


def cast_blocks(
    matrix: Tensor,
    spec: CastSpec,
    *,
    direct: bool = True,
    transposed: bool = False,
    values: Tensor | None = None,
    record: AmaxRecord | None = None,
) -> tuple[OrientedCast | None, OrientedCast | None]:
    """A scale for every block of a matrix, of its transpose, or of both.

    Args:
        matrix: [M, K] float32, bfloat16 or float16, not empty, its columns side by side.
        spec: how to cast; rows and columns of its blocks are powers of two up to 128, in each order its own.
        direct: whether to write the matrix.
        transposed: whether to write its transpose, [K, M].
        values: where to write what the codes of ``direct`` alone stand for, instead of codes: shaped as ``matrix``, or
            itself.
        record: where to record NaN and ±Inf; its amax is left to the caller.
    """
    assert isinstance(spec.granularity, PerBlock)
    block = (spec.granularity.rows, spec.granularity.columns)
    device, (rows, columns) = matrix.device, matrix.shape
    codes = spec.format.torch_dtype
    out = torch.empty(rows, columns, dtype=codes, device=device) if direct and values is None else values
    transposed_codes = torch.empty(columns, rows, dtype=codes, device=device) if transposed else None
    scales, amaxes = _groups(rows, columns, block, device) if direct else (None, None)
    transposed_scales, transposed_amaxes = _groups(columns, rows, block, device) if transposed else (None, None)
    down, across, warps = _tile(block, one_way=direct and not transposed)
    launching.launch(
        cast_blocks_kernel, (launching.ceil_div(rows, down) * launching.ceil_div(columns, across),),
        matrix, casts.as_kernel_output(out), casts.as_kernel_output(transposed_codes),
        scales, amaxes, transposed_scales, transposed_amaxes, *casts.nonfinite_buffers(record),
        rows, columns, matrix.stride(0), columns if out is None else out.stride(0),
        DIRECT=direct, TRANSPOSED=transposed, VALUES=values is not None, ROWS=block[0], COLUMNS=block[1],
        **casts.constants(spec, device), DOWN=down, ACROSS=across, num_warps=warps,
    )  # fmt: skip
    cast_matrix = None if out is None or scales is None else OrientedCast(out, scales, amaxes)
    if transposed_codes is None or transposed_scales is None:
        return cast_matrix, None
    return cast_matrix, OrientedCast(transposed_codes, transposed_scales, transposed_amaxes)


def _tile(block: tuple[int, int], *, one_way: bool) -> tuple[int, int, int]:
    """Rows and columns of a program's tile, and its warps, so that no thread spills: 16 to 32 elements each."""
    if one_way and block[0] <= 32:  # without a transpose a line of 128 bytes is all that is to be filled
        return 32, 128, 4
    if 128 in block:  # 128 rows for the blocks of one order, 128 columns for those of the other
        return 128, 128, 32 if block == (128, 128) and not one_way else 16
    return 64, 64, 8


def _groups(rows: int, columns: int, block: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Uninitialized memory for scales and amaxes, float32 [⌈rows / block rows⌉, ⌈columns / block columns⌉]."""
    shape = (launching.ceil_div(rows, block[0]), launching.ceil_div(columns, block[1]))
    scales, amaxes = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
    return scales, amaxes

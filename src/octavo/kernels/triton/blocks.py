"""Casts with a scale for every block of rows x columns, of a matrix, of its transpose, or of both.

A block lies inside a tile of 32 x 128, 64 x 64 or 128 x 128, so that everything is done in one reading. Blocks of
the transpose are columns x rows here; square blocks are the same both ways, and their codes are made once.

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
    Lines,
    any_broken,
    as_held,
    ceil_div,
    codes_of,
    finite,
    first_of_tile,
    highest,
    is_broken,
    report,
)
from octavo.kernels.triton.codes import encode_scale_from_amax, number_from_code, reciprocal
from octavo.numerics import CastSpec, PerBlock, Record

__all__ = ["LARGEST", "cast_blocks"]

LARGEST = 128  # rows and columns of a block; both are powers of two


@triton.jit
def _highest(blocks):
    return highest(highest(blocks, 3), 1)


@triton.jit
def _amaxes(blocks, overflowed, nonfinite):
    """The amax of each of blocks [down, rows, across, columns], [down, across]; reports what is not finite."""
    amax = _highest(blocks)
    if any_broken(amax):
        report(overflowed, nonfinite, is_broken(blocks))
        amax = _highest(finite(blocks))
    return amax


@triton.jit
def _tile_in(made, memory, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """Blocks of codes as the tile that they are, for the memory that holds it."""
    return as_held(tl.reshape(made, (DOWN, ACROSS)), memory)


@triton.jit
def cast_blocks_kernel(
    x, out, flipped, scales, amaxes, flipped_scales, flipped_amaxes, overflowed, nonfinite,
    rows, columns, stride, out_stride,
    DIRECT: tl.constexpr, FLIPPED: tl.constexpr, VALUES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, ROUNDING: tl.constexpr, FLOOR: tl.constexpr,
    MARGIN: tl.constexpr, PROPAGATE: tl.constexpr, HARDWARE: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Reads x once, writes a byte an element for each order; with VALUES, x's size once."""
    row, column = first_of_tile(tl.program_id(0), columns, DOWN, ACROSS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    number = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    across = ceil_div(columns, ACROSS)
    first_row, first_column = tl.program_id(0) // across * DOWN, tl.program_id(0) % across * ACROSS
    if DIRECT or ROWS == COLUMNS:
        blocks = tl.reshape(number, (DOWN // ROWS, ROWS, ACROSS // COLUMNS, COLUMNS))
        amax = _amaxes(blocks, overflowed, nonfinite)
        encode = encode_scale_from_amax(amax, MAX, MANTISSA, ROUNDING, FLOOR, MARGIN)
        decode = reciprocal(encode)
        block_row = first_row // ROWS + tl.arange(0, DOWN // ROWS)[:, None]
        block_column = first_column // COLUMNS + tl.arange(0, ACROSS // COLUMNS)[None, :]
        blocks_down, blocks_across = ceil_div(rows, ROWS), ceil_div(columns, COLUMNS)
        at = block_row.to(tl.int64) * blocks_across + block_column
        within = (block_row < blocks_down) & (block_column < blocks_across)
        made = codes_of(blocks, encode[:, None, :, None], MAX, MANTISSA, BIAS, PROPAGATE, HARDWARE)
        if DIRECT:
            tl.store(scales + at, decode, mask=within)
            tl.store(amaxes + at, amax, mask=within)
        if VALUES:
            value = number_from_code(made, MANTISSA, HARDWARE) * decode[:, None, :, None]
            value = tl.reshape(value, (DOWN, ACROSS))
            tl.store(out + row[:, None] * out_stride + column[None, :], value.to(out.dtype.element_ty), mask=inside)
        elif DIRECT:
            tl.store(out + row[:, None] * out_stride + column[None, :], _tile_in(made, out, DOWN, ACROSS), mask=inside)
    if FLIPPED:
        if ROWS != COLUMNS:
            blocks = tl.reshape(number, (DOWN // COLUMNS, COLUMNS, ACROSS // ROWS, ROWS))
            if DIRECT:  # has reported them
                amax = _amaxes(blocks, None, None)
            else:
                amax = _amaxes(blocks, overflowed, nonfinite)
            encode = encode_scale_from_amax(amax, MAX, MANTISSA, ROUNDING, FLOOR, MARGIN)
            decode = reciprocal(encode)
            made = codes_of(blocks, encode[:, None, :, None], MAX, MANTISSA, BIAS, PROPAGATE, HARDWARE)
        group_row = first_row // COLUMNS + tl.arange(0, DOWN // COLUMNS)[:, None]
        group_column = first_column // ROWS + tl.arange(0, ACROSS // ROWS)[None, :]
        groups_down, groups_across = ceil_div(rows, COLUMNS), ceil_div(columns, ROWS)
        place = group_column.to(tl.int64) * groups_down + group_row
        within = (group_row < groups_down) & (group_column < groups_across)
        tl.store(flipped_scales + place, decode, mask=within)
        tl.store(flipped_amaxes + place, amax, mask=within)
        turned = (column < columns)[:, None] & (row < rows)[None, :]
        made = tl.trans(_tile_in(made, flipped, DOWN, ACROSS))
        tl.store(flipped + column[:, None] * rows + row[None, :], made, mask=turned)


def cast_blocks(
    matrix: Tensor,
    spec: CastSpec,
    *,
    direct: bool = True,
    flipped: bool = False,
    values: Tensor | None = None,
    into: Record | None = None,
) -> tuple[Lines | None, Lines | None]:
    """A scale for every block of a matrix, of its transpose, or of both.

    Args:
        matrix: [M, K] float32, bfloat16 or float16, not empty, its columns side by side.
        spec: how to cast; rows and columns of its blocks are powers of two up to 128, in each order its own.
        direct: whether to write the matrix.
        flipped: whether to write its transpose, [K, M].
        values: where to write what the codes of ``direct`` alone stand for, instead of codes: shaped as ``matrix``, or
            itself.
        into: where to record NaN and ±Inf; its amax is left to the caller.
    """
    assert isinstance(spec.granularity, PerBlock)
    block = (spec.granularity.rows, spec.granularity.columns)
    device, (rows, columns) = matrix.device, matrix.shape
    out = (
        casts.empty_codes(rows, columns, spec.format, device, wanted=direct and values is None)
        if values is None
        else values
    )
    turned = casts.empty_codes(columns, rows, spec.format, device, wanted=flipped)
    scales, amaxes = _groups(rows, columns, block, device)
    flipped_scales, flipped_amaxes = _groups(columns, rows, block, device)
    down, across, warps = _tile(block, one_way=direct and not flipped)
    launching.launch(
        cast_blocks_kernel, (launching.ceil_div(rows, down) * launching.ceil_div(columns, across),),
        matrix, casts.as_written(out), casts.as_written(turned),
        scales, amaxes, flipped_scales, flipped_amaxes, *casts.where_broken_goes(into),
        rows, columns, matrix.stride(0), out.stride(0),
        DIRECT=direct, FLIPPED=flipped, VALUES=values is not None, ROWS=block[0], COLUMNS=block[1],
        **casts.constants(spec, device), DOWN=down, ACROSS=across, num_warps=warps,
    )  # fmt: skip
    return Lines(out, scales, amaxes) if direct else None, Lines(
        turned, flipped_scales, flipped_amaxes
    ) if flipped else None


def _tile(block: tuple[int, int], *, one_way: bool) -> tuple[int, int, int]:
    """Rows and columns of a program's tile, and its warps."""
    if one_way and block[0] <= 32:  # without a transpose a line of 128 bytes is all that is to be filled
        return 32, 128, 4
    if 128 in block:
        return 128, 128, 32 if block == (128, 128) and not one_way else 16
    return 64, 64, 8


def _groups(rows: int, columns: int, block: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for scales and amaxes."""
    shape = (launching.ceil_div(rows, block[0]), launching.ceil_div(columns, block[1]))
    scales, amaxes = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
    return scales, amaxes

"""Casts with a scale a row, of a matrix and of its transpose.

A row that fits into registers is read once. A row of the transpose is a column, of which no program sees more than a
part: columns are measured first and cast in a second reading, and rows with them where both are wanted.

| call             | launches | bytes read    | bytes written |
|------------------|----------|---------------|---------------|
| rows             | 1        | size of x     | 1 an element  |
| columns          | 2        | 2 · size of x | 1 an element  |
| rows and columns | 2        | 2 · size of x | 2 an element  |

Rows longer than 16384 are measured and cast as columns are. Lines' amaxes, which tiles raise atomically, are cleared
by one launch more.
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
from octavo.numerics import CastSpec, Record

__all__ = ["cast_rows"]

_LONGEST = 16384  # elements of a row in registers: 32 a thread
_ELEMENTS = 4096  # of the rows that a program casts, where they are shorter


@triton.jit
def cast_rows_kernel(
    x, out, scales, amaxes, overflowed, nonfinite,
    rows, columns, stride, out_stride,
    VALUES: tl.constexpr,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, ROUNDING: tl.constexpr, FLOOR: tl.constexpr,
    MARGIN: tl.constexpr, PROPAGATE: tl.constexpr, HARDWARE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Whole rows. Reads x once, writes a byte an element (with VALUES x's size) and 8 bytes a row."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    number = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    amax = highest(number, 1)
    if any_broken(amax):
        report(overflowed, nonfinite, is_broken(number))
        amax = highest(finite(number), 1)
    encode = encode_scale_from_amax(amax, MAX, MANTISSA, ROUNDING, FLOOR, MARGIN)
    decode = reciprocal(encode)
    tl.store(amaxes + row, amax, mask=row < rows)
    tl.store(scales + row, decode, mask=row < rows)
    made = codes_of(number, encode[:, None], MAX, MANTISSA, BIAS, PROPAGATE, HARDWARE)
    if VALUES:
        value = number_from_code(made, MANTISSA, HARDWARE) * decode[:, None]
        tl.store(out + row[:, None] * out_stride + column[None, :], value.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(out + row[:, None] * out_stride + column[None, :], as_held(made, out), mask=inside)


@triton.jit
def measure_lines_kernel(
    x, amaxes, overflowed, nonfinite,
    rows, columns, stride, first_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Amaxes of rows, of columns from ``first_column`` on, or both, raised by every tile.

    Reads x once, writes 4 bytes a line of a tile.
    """
    row, column = first_of_tile(tl.program_id(0), columns, BLOCK_ROWS, BLOCK_COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    number = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    of_rows, of_columns = highest(number, 1), highest(number, 0)
    if any_broken(of_columns):
        report(overflowed, nonfinite, is_broken(number))
        of_rows, of_columns = highest(finite(number), 1), highest(finite(number), 0)
    if ROWS:  # as bits, which are in the same order
        tl.atomic_max(amaxes + row, of_rows.to(tl.int32, bitcast=True), mask=row < rows, sem="relaxed")
    if COLUMNS:
        of_columns = of_columns.to(tl.int32, bitcast=True)
        tl.atomic_max(amaxes + first_column + column, of_columns, mask=column < columns, sem="relaxed")


@triton.jit
def cast_lines_kernel(
    x, out, flipped, amaxes, row_scales, column_scales,
    rows, columns, stride, first_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, ROUNDING: tl.constexpr, FLOOR: tl.constexpr,
    MARGIN: tl.constexpr, PROPAGATE: tl.constexpr, HARDWARE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows, columns or both, measured before. Reads x once, writes a byte an element for each of the two."""
    row, column = first_of_tile(tl.program_id(0), columns, BLOCK_ROWS, BLOCK_COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    number = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if ROWS:
        amax = tl.load(amaxes + row, mask=row < rows, other=0).to(tl.float32, bitcast=True)
        encode = encode_scale_from_amax(amax, MAX, MANTISSA, ROUNDING, FLOOR, MARGIN)
        if tl.program_id(0) % ceil_div(columns, BLOCK_COLUMNS) == 0:
            tl.store(row_scales + row, reciprocal(encode), mask=row < rows)
        made = codes_of(number, encode[:, None], MAX, MANTISSA, BIAS, PROPAGATE, HARDWARE)
        tl.store(out + row[:, None] * columns + column[None, :], as_held(made, out), mask=inside)
    if COLUMNS:
        amax = tl.load(amaxes + first_column + column, mask=column < columns, other=0)
        amax = amax.to(tl.float32, bitcast=True)
        encode = encode_scale_from_amax(amax, MAX, MANTISSA, ROUNDING, FLOOR, MARGIN)
        if tl.program_id(0) < ceil_div(columns, BLOCK_COLUMNS):
            tl.store(column_scales + column, reciprocal(encode), mask=column < columns)
        made = codes_of(number, encode[None, :], MAX, MANTISSA, BIAS, PROPAGATE, HARDWARE)
        turned = (column < columns)[:, None] & (row < rows)[None, :]
        tl.store(flipped + column[:, None] * rows + row[None, :], as_held(tl.trans(made), flipped), mask=turned)


def cast_rows(
    matrix: Tensor,
    spec: CastSpec,
    *,
    direct: bool = True,
    flipped: bool = False,
    values: Tensor | None = None,
    into: Record | None = None,
) -> tuple[Lines | None, Lines | None]:
    """A scale for every row of a matrix, of its transpose, or of both.

    Args:
        matrix: [M, K] float32, bfloat16 or float16, not empty, its columns side by side.
        spec: how to cast; its granularity is a row.
        direct: whether to write the rows.
        flipped: whether to write the columns, as the rows of [K, M].
        values: where to write what the codes of ``direct`` alone stand for, instead of codes: shaped as ``matrix``, or
            itself; K is 16384 at most.
        into: where to record NaN and ±Inf; its amax is left to the caller.
    """
    if flipped or matrix.shape[1] > _LONGEST:
        return _cast_lines(matrix, spec, into, direct=direct, flipped=flipped)
    device, (rows, columns) = matrix.device, matrix.shape
    out = casts.empty_codes(rows, columns, spec.format, device, wanted=values is None) if values is None else values
    scales, amaxes = (torch.empty(rows, 1, dtype=torch.float32, device=device) for _ in range(2))
    block_columns = launching.next_power_of_2(columns)
    block_rows = launching.tile_side(rows, max(1, _ELEMENTS // block_columns))
    launching.launch(
        cast_rows_kernel, (launching.ceil_div(rows, block_rows),),
        matrix, casts.as_written(out), scales, amaxes, *casts.where_broken_goes(into),
        rows, columns, matrix.stride(0), out.stride(0),
        VALUES=values is not None, **casts.constants(spec, device),
        BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns,
        num_warps=min(16, max(4, block_rows * block_columns // 1024)),
    )  # fmt: skip
    return Lines(out, scales, amaxes), None


def _cast_lines(
    matrix: Tensor, spec: CastSpec, into: Record | None, *, direct: bool, flipped: bool
) -> tuple[Lines | None, Lines | None]:
    device, (rows, columns) = matrix.device, matrix.shape
    row_scales, column_scales = (torch.empty(n, 1, dtype=torch.float32, device=device) for n in (rows, columns))
    first_column = launching.ceil_div(rows, 4) * 4  # of 16 bytes; one launch clears rows' and columns' amaxes
    amaxes = torch.zeros(first_column + columns, dtype=torch.int32, device=device)
    out = casts.empty_codes(rows, columns, spec.format, device, wanted=direct)
    turned = casts.empty_codes(columns, rows, spec.format, device, wanted=flipped)
    grid = (launching.ceil_div(rows, casts.TILE[0]) * launching.ceil_div(columns, casts.TILE[1]),)
    sizes = (rows, columns, matrix.stride(0), first_column)
    wanted = {
        "ROWS": direct,
        "COLUMNS": flipped,
        "BLOCK_ROWS": casts.TILE[0],
        "BLOCK_COLUMNS": casts.TILE[1],
        "num_warps": 8,
    }
    launching.launch(measure_lines_kernel, grid, matrix, amaxes, *casts.where_broken_goes(into), *sizes, **wanted)
    launching.launch(
        cast_lines_kernel, grid,
        matrix, casts.as_written(out), casts.as_written(turned), amaxes, row_scales, column_scales, *sizes,
        **wanted, **casts.constants(spec, device),
    )  # fmt: skip
    parts = (amaxes.narrow(0, 0, rows), amaxes.narrow(0, first_column, columns))
    found = [part.view(torch.float32).unsqueeze(1) for part in parts]
    return Lines(out, row_scales, found[0]) if direct else None, Lines(
        turned, column_scales, found[1]
    ) if flipped else None

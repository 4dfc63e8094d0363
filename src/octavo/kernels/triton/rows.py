"""Rowwise casts, of a matrix and of its transpose.

    codes[r, :] = RNE(fp32(x[r, :]) · encode[r]),  encode[r] = MAX / max |x[r, :]|,  scale[r] = 1 / encode[r]

A row that fits into the registers of one program is read once. A row of the transpose is a column of the matrix, of
which a program sees only a part: columns are measured by one launch and cast in a second reading, and rows with them
where both orders are wanted.

| call             | launches | bytes read    | bytes written |
|------------------|----------|---------------|---------------|
| rows             | 1        | size of x     | 1 an element  |
| columns          | 2        | 2 · size of x | 1 an element  |
| rows and columns | 2        | 2 · size of x | 2 an element  |

Rows longer than 16384 are measured and cast as columns are. Amaxes that several tiles raise atomically are cleared by
one launch more.
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
from octavo.kernels.triton.codes import LEAST_PER_WARP, encode_scale_from_amax, number_from_code, reciprocal
from octavo.numerics import AmaxRecord, CastSpec

__all__ = ["cast_rows"]

_LONGEST = 16384  # elements of a row in registers: 32 a thread
_ELEMENTS, _WARPS = 4096, 4  # of a program that casts several rows, where they are shorter


@triton.jit
def cast_rows_kernel(
    x,  # [rows, columns] row-major, `stride` elements from row to row
    out,  # codes, or values in x's dtype: [rows, columns] row-major, `out_stride` from row to row; may be x itself
    scales, amaxes,  # float32 [rows, 1]: written
    overflowed, nonfinite,  # uint8 and int64, one element each, or None: raised
    rows, columns, stride, out_stride,
    VALUES: tl.constexpr,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, ROUNDING: tl.constexpr, FLOOR: tl.constexpr,
    MARGIN: tl.constexpr, PROPAGATE: tl.constexpr, HARDWARE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Cast whole rows; with VALUES, codes · scale instead of codes.

    A program owns BLOCK_ROWS whole rows: BLOCK_COLUMNS is a power of two, ``columns`` or more. So it knows an amax
    before it casts, and the row stays in registers in between. Reads x once, writes a byte an element (with VALUES x's
    size) and 8 bytes a row.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # int64: row * stride may exceed int32
    column = tl.arange(0, BLOCK_COLUMNS)
    # 0 beyond the row's end raises no amax of magnitudes.
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    number = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    amax = max_magnitude(number, 1)
    # An amax is NaN or infinite if an element of its row is: the maximum proves that all others are finite, and only
    # then are elements masked and counted. The scale is that of the finite elements.
    if any_nonfinite(amax):
        record_nonfinite(overflowed, nonfinite, is_nonfinite(number))
        amax = max_magnitude(zero_nonfinite(number), 1)
    encode = encode_scale_from_amax(amax, MAX, MANTISSA, ROUNDING, FLOOR, MARGIN)
    decode = reciprocal(encode)
    tl.store(amaxes + row, amax, mask=row < rows)
    tl.store(scales + row, decode, mask=row < rows)
    codes = codes_of(number, encode[:, None], MAX, MANTISSA, BIAS, PROPAGATE, HARDWARE)
    if VALUES:
        value = number_from_code(codes, MANTISSA, HARDWARE) * decode[:, None]
        tl.store(out + row[:, None] * out_stride + column[None, :], value.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(out + row[:, None] * out_stride + column[None, :], as_stored(codes, out), mask=inside)


@triton.jit
def measure_rows_and_columns_kernel(
    x,  # [rows, columns] row-major, `stride` elements from row to row
    amaxes,  # int32 [first_column + columns], zeros: bits of the rows' amaxes, from first_column on of the columns'
    overflowed, nonfinite,  # uint8 and int64, one element each, or None: raised
    rows, columns, stride, first_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Amaxes of rows (ROWS), columns (COLUMNS), or both: amaxes[i] = max(amaxes[i], bits(max |x[i]|)).

    A program owns a tile [BLOCK_ROWS, BLOCK_COLUMNS], and raises the amax of each of its rows and columns, as other
    tiles do. Reads x once, writes 4 bytes for each row and column of a tile.
    """
    row, column = first_of_tile(tl.program_id(0), columns, BLOCK_ROWS, BLOCK_COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    number = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    of_rows, of_columns = max_magnitude(number, 1), max_magnitude(number, 0)  # without ROWS of_rows is compiled away
    if any_nonfinite(of_columns):  # they cover every element of the tile, as of_rows does: one test is enough
        record_nonfinite(overflowed, nonfinite, is_nonfinite(number))
        of_rows, of_columns = max_magnitude(zero_nonfinite(number), 1), max_magnitude(zero_nonfinite(number), 0)
    # As bits: those of non-negative FP32 numbers are in the numbers' order. A maximum does not depend on the order of
    # the programs, so results are the same every time.
    if ROWS:
        tl.atomic_max(amaxes + row, of_rows.to(tl.int32, bitcast=True), mask=row < rows, sem="relaxed")
    if COLUMNS:
        of_columns = of_columns.to(tl.int32, bitcast=True)
        tl.atomic_max(amaxes + first_column + column, of_columns, mask=column < columns, sem="relaxed")


@triton.jit
def cast_rows_and_columns_kernel(
    x,  # [rows, columns] row-major, `stride` elements from row to row
    out, transposed,  # codes, or None: [rows, columns] and, of the transpose, [columns, rows], row-major without gaps
    amaxes,  # int32 [first_column + columns], see measure_rows_and_columns_kernel
    row_scales, column_scales,  # float32 [rows, 1] and [columns, 1]: written
    rows, columns, stride, first_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, ROUNDING: tl.constexpr, FLOOR: tl.constexpr,
    MARGIN: tl.constexpr, PROPAGATE: tl.constexpr, HARDWARE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Cast rows, columns or both, by the amaxes of measure_rows_and_columns_kernel.

    A program owns a tile [BLOCK_ROWS, BLOCK_COLUMNS] for both orders. Reads x once, writes a byte an element for each.
    Rows and columns have different scales, so their codes differ: the transpose is a second cast, not a copy.
    """
    row, column = first_of_tile(tl.program_id(0), columns, BLOCK_ROWS, BLOCK_COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    number = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if ROWS:
        amax = tl.load(amaxes + row, mask=row < rows, other=0).to(tl.float32, bitcast=True)
        encode = encode_scale_from_amax(amax, MAX, MANTISSA, ROUNDING, FLOOR, MARGIN)
        if tl.program_id(0) % ceil_div(columns, BLOCK_COLUMNS) == 0:  # the first tile of a row of tiles stores scales
            tl.store(row_scales + row, reciprocal(encode), mask=row < rows)
        codes = codes_of(number, encode[:, None], MAX, MANTISSA, BIAS, PROPAGATE, HARDWARE)
        tl.store(out + row[:, None] * columns + column[None, :], as_stored(codes, out), mask=inside)
    if COLUMNS:
        amax = tl.load(amaxes + first_column + column, mask=column < columns, other=0)
        amax = amax.to(tl.float32, bitcast=True)
        encode = encode_scale_from_amax(amax, MAX, MANTISSA, ROUNDING, FLOOR, MARGIN)
        if tl.program_id(0) < ceil_div(columns, BLOCK_COLUMNS):  # the first row of tiles
            tl.store(column_scales + column, reciprocal(encode), mask=column < columns)
        codes = codes_of(number, encode[None, :], MAX, MANTISSA, BIAS, PROPAGATE, HARDWARE)
        inside_t = (column < columns)[:, None] & (row < rows)[None, :]
        tl.store(
            transposed + column[:, None] * rows + row[None, :], as_stored(tl.trans(codes), transposed), mask=inside_t
        )


def cast_rows(
    matrix: Tensor,
    spec: CastSpec,
    *,
    direct: bool = True,
    transposed: bool = False,
    values: Tensor | None = None,
    record: AmaxRecord | None = None,
) -> tuple[OrientedCast | None, OrientedCast | None]:
    """A scale for every row of a matrix, of its transpose, or of both.

    Args:
        matrix: [M, K] float32, bfloat16 or float16, not empty, its columns side by side.
        spec: how to cast; its granularity is a row.
        direct: whether to write the rows.
        transposed: whether to write the columns, as the rows of [K, M].
        values: where to write what the codes of ``direct`` alone stand for, instead of codes: shaped as ``matrix``, or
            itself; K is 16384 at most.
        record: where to record NaN and ±Inf; its amax is left to the caller.
    """
    if transposed or matrix.shape[1] > _LONGEST:
        return _cast_rows_and_columns(matrix, spec, record, direct=direct, transposed=transposed)
    device, (rows, columns) = matrix.device, matrix.shape
    out = torch.empty(rows, columns, dtype=spec.format.torch_dtype, device=device) if values is None else values
    scales, amaxes = (torch.empty(rows, 1, dtype=torch.float32, device=device) for _ in range(2))
    block_columns = launching.next_power_of_2(columns)
    least = _WARPS * LEAST_PER_WARP // block_columns
    block_rows = launching.tile_side(rows, max(1, _ELEMENTS // block_columns), least=least)
    launching.launch(
        cast_rows_kernel, (launching.ceil_div(rows, block_rows),),
        matrix, casts.as_kernel_output(out), scales, amaxes, *casts.nonfinite_buffers(record),
        rows, columns, matrix.stride(0), out.stride(0),
        VALUES=values is not None, **casts.constants(spec, device),
        BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns,
        num_warps=min(16, max(_WARPS, block_rows * block_columns // 1024)),
    )  # fmt: skip
    return OrientedCast(out, scales, amaxes), None


def _cast_rows_and_columns(
    matrix: Tensor, spec: CastSpec, record: AmaxRecord | None, *, direct: bool, transposed: bool
) -> tuple[OrientedCast | None, OrientedCast | None]:
    device, (rows, columns) = matrix.device, matrix.shape
    row_scales, column_scales = (torch.empty(n, 1, dtype=torch.float32, device=device) for n in (rows, columns))
    first_column = launching.ceil_div(rows, 4) * 4  # of 16 bytes; one launch clears rows' and columns' amaxes
    amaxes = torch.zeros(first_column + columns, dtype=torch.int32, device=device)
    codes = spec.format.torch_dtype
    out = torch.empty(rows, columns, dtype=codes, device=device) if direct else None
    transposed_codes = torch.empty(columns, rows, dtype=codes, device=device) if transposed else None
    grid = (launching.ceil_div(rows, casts.TILE[0]) * launching.ceil_div(columns, casts.TILE[1]),)
    sizes = (rows, columns, matrix.stride(0), first_column)
    options = {
        "ROWS": direct,
        "COLUMNS": transposed,
        "BLOCK_ROWS": casts.TILE[0],
        "BLOCK_COLUMNS": casts.TILE[1],
        "num_warps": 8,
    }
    launching.launch(
        measure_rows_and_columns_kernel, grid, matrix, amaxes, *casts.nonfinite_buffers(record), *sizes, **options
    )
    launching.launch(
        cast_rows_and_columns_kernel, grid,
        matrix, casts.as_kernel_output(out), casts.as_kernel_output(transposed_codes),
        amaxes, row_scales, column_scales, *sizes, **options, **casts.constants(spec, device),
    )  # fmt: skip
    parts = (amaxes.narrow(0, 0, rows), amaxes.narrow(0, first_column, columns))
    row_amaxes, column_amaxes = (part.view(torch.float32).unsqueeze(1) for part in parts)
    return (
        None if out is None else OrientedCast(out, row_scales, row_amaxes),
        None if transposed_codes is None else OrientedCast(transposed_codes, column_scales, column_amaxes),
    )

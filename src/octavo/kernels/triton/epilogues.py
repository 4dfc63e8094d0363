"""Epilogues of fused kernels: measure a result while it is still in registers, cast it, write the codes.

    codes = RNE(y · encode),  encode = MAX / amax of y's scaling group,  scale = 1 / encode

y is FP32 numbers that were rounded to the dtype of the unfused layer's output, so that the codes are those of that
output, cast. Two shapes occur. A *row* is a whole row of the result, whose own amax can scale it at once. A *tile* is
ROWS x COLUMNS of it, for scales that are known, or that belong to blocks inside the tile, and for codes written in both
orientations; codes are contiguous and row-major:

| operand    | codes  | groups                        | scale                |
|------------|--------|-------------------------------|----------------------|
| output     | [R, H] | tensor; a row; B along a row  | [], [R, 1], [R, H/B] |
| transposed | [H, R] | tensor; a row; B along a row  | [], [H, 1], [H, R/B] |

Measurements go to ``measured``, int32: the bits of the largest finite magnitude, the number of NaN and ±Inf and, from
``COLUMN_AMAXES`` on, the bits of the columns' amaxes where columns have scales of their own. The bits of non-negative
FP32 numbers are in the numbers' order, so atomic integer maxima find them, whatever the order of the programs.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import E8M0
from octavo.kernels.result_cast import ResultBuffers, ResultCast, new_buffers
from octavo.kernels.triton import launching
from octavo.kernels.triton.codes import (
    LEAST_PER_WARP,
    code_from_number,
    encode_scale_from_amax,
    finite_magnitude,
    format_constants,
    has_hardware_casts,
    is_infinite,
    reciprocal,
)
from octavo.numerics import Nonfinite, PerBlock, PerRow

__all__ = [
    "COLUMN_AMAXES",
    "PLAIN_ARITHMETIC",
    "ROW",
    "TENSOR",
    "Launch",
    "add_measurement",
    "cast_row",
    "cast_tile",
    "launch_of",
    "row_launch",
    "tile",
    "tiles",
]

# No fused multiply-adds: the kernel that measures and the one that casts compute y in differently compiled code, and
# must find the same bits.
PLAIN_ARITHMETIC = {"enable_fp_fusion": False}

# GROUPS, which elements share a scale: all, a row, or (any larger number) so many along a row.
TENSOR: tl.constexpr = tl.constexpr(0)
ROW: tl.constexpr = tl.constexpr(1)
COLUMN_AMAXES: tl.constexpr = tl.constexpr(4)  # int32 before them in measured: 16 bytes, which keeps them aligned

_FP32_MAX: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def add_measurement(measured, amax, nonfinite):
    """Raise measured[0] to an amax, and measured[1] by a count; both are single numbers."""
    # "relaxed": the next kernel reads them, and a launch on the same stream orders memory by itself.
    tl.atomic_max(measured, amax.to(tl.int32, bitcast=True), sem="relaxed")
    if nonfinite > 0:  # nearly never: one atomic operation a program, not two
        tl.atomic_add(measured + 1, nonfinite, sem="relaxed")


@triton.jit
def _store_scale(at, encode, mask, E8M0: tl.constexpr):
    """Store the decode scales that belong to encode scales."""
    scale = reciprocal(encode)
    if E8M0:  # powers of two: the exponent field is the byte, as both biases are 127
        tl.store(at, (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8), mask=mask)
    else:
        tl.store(at, scale, mask=mask)


@triton.jit
def _tensor_encode_scale(
    measured, known, KNOWN: tl.constexpr,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, ROUNDING: tl.constexpr, FLOOR: tl.constexpr, MARGIN: tl.constexpr,
):  # fmt: skip
    """The encode scale of a whole tensor, [1].

    KNOWN is what ``known`` points to: "scale", a decode scale; "amax", an amax that is used unless it is 0; or "",
    nothing. Otherwise the amax is ``measured``'s, of the launch before. Every program computes the scale by itself: a
    division each, instead of one launch more.
    """
    one = tl.arange(0, 1)
    if KNOWN == "scale":
        # The reciprocal of a subnormal scale may be infinite.
        encode = tl.minimum(reciprocal(tl.load(known + one)), _FP32_MAX)
    else:
        amax = tl.load(measured + one).to(tl.float32, bitcast=True)
        if KNOWN == "amax":
            past = tl.load(known + one)
            amax = tl.where(past > 0, past, amax)
        encode = encode_scale_from_amax(amax, MAX, MANTISSA, ROUNDING, FLOOR, MARGIN)
    return encode


@triton.jit
def cast_row(
    y, magnitude,  # [SIZE] in registers: FP32 numbers, and |y| with 0 in place of NaN and ±Inf
    row, at, inside, columns,  # which row; [SIZE] its columns, and which of them are inside the matrix
    output, output_scale,  # uint8 codes [rows, columns] row-major; float32 or E8M0 [rows, 1]
    MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, ROUNDING: tl.constexpr, FLOOR: tl.constexpr,
    MARGIN: tl.constexpr, E8M0: tl.constexpr, PROPAGATE: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Cast a whole row, which one program holds, by its own amax."""
    amax = tl.max(magnitude, axis=0, keep_dims=True)
    encode = encode_scale_from_amax(amax, MAX, MANTISSA, ROUNDING, FLOOR, MARGIN)
    codes = code_from_number(y * encode, MAX, MANTISSA, BIAS, PROPAGATE, HARDWARE, is_infinite(y))
    tl.store(output + row.to(tl.int64) * columns + at, codes, mask=inside)  # int64: row * columns may exceed int32
    one = tl.arange(0, 1)
    _store_scale(output_scale + row + one, encode, one == 0, E8M0)


@triton.jit
def cast_tile(
    y,  # [ROWS, COLUMNS] FP32 in registers, 0 beyond the matrix
    row_tile, column_tile, rows, columns,
    output, output_scale,  # uint8 codes [rows, columns] row-major; the granularity's shape, see the module's table
    transposed, transposed_scale,  # uint8 codes [columns, rows] row-major; the granularity's shape of the transpose
    measured, known, KNOWN: tl.constexpr, GROUPS: tl.constexpr, DIRECT: tl.constexpr, TRANSPOSE: tl.constexpr,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, ROUNDING: tl.constexpr, FLOOR: tl.constexpr,
    MARGIN: tl.constexpr, E8M0: tl.constexpr, PROPAGATE: tl.constexpr, HARDWARE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Cast a tile by GROUPS: TENSOR, ROW or a block's width; write it (DIRECT), its transpose (TRANSPOSE) or both.

    With ROW only the transpose is written here, by the columns' amaxes: rows of the output are :func:`cast_row`'s, as a
    tile does not see the whole of a row.
    """
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    infinite = is_infinite(y)
    if GROUPS == TENSOR:  # one scale both ways: codes are computed once and transposed
        encode = _tensor_encode_scale(measured, known, KNOWN, MAX, MANTISSA, ROUNDING, FLOOR, MARGIN)
        codes = code_from_number(y * encode[:, None], MAX, MANTISSA, BIAS, PROPAGATE, HARDWARE, infinite)
        if KNOWN != "scale":  # the first tile stores it; a given scale is in memory already
            one = tl.arange(0, 1)
            _store_scale(output_scale + one, encode, (one == 0) & (row_tile == 0) & (column_tile == 0), E8M0)
    elif GROUPS == ROW:
        amax = tl.load(measured + COLUMN_AMAXES + column, mask=column < columns, other=0)
        amax = amax.to(tl.float32, bitcast=True)
        encode = encode_scale_from_amax(amax, MAX, MANTISSA, ROUNDING, FLOOR, MARGIN)
        _store_scale(transposed_scale + column, encode, (column < columns) & (row_tile == 0), E8M0)
        codes = code_from_number(y * encode[None, :], MAX, MANTISSA, BIAS, PROPAGATE, HARDWARE, infinite)
    elif DIRECT:  # blocks along K lie along the rows of either order, so each order has its own scales and codes
        encode = _block_encode_scale(
            y, output_scale, row, column_tile, rows, columns,
            MAX, MANTISSA, ROUNDING, FLOOR, MARGIN, E8M0, GROUPS, ROWS, COLUMNS,
        )  # fmt: skip
        codes = code_from_number(y * encode, MAX, MANTISSA, BIAS, PROPAGATE, HARDWARE, infinite)
    if DIRECT and GROUPS != ROW:
        at = row[:, None].to(tl.int64) * columns + column[None, :]
        tl.store(output + at, codes, mask=(row < rows)[:, None] & (column < columns)[None, :])
    if TRANSPOSE:
        if GROUPS > ROW:
            # Threads exchange FP32 numbers here, since the codes of the transpose are not known before its amaxes.
            y_t = tl.trans(y)
            encode = _block_encode_scale(
                y_t, transposed_scale, column, row_tile, columns, rows,
                MAX, MANTISSA, ROUNDING, FLOOR, MARGIN, E8M0, GROUPS, COLUMNS, ROWS,
            )  # fmt: skip
            infinite = is_infinite(y_t)
            codes = code_from_number(y_t * encode, MAX, MANTISSA, BIAS, PROPAGATE, HARDWARE, infinite)
        else:
            codes = tl.trans(codes)
        at = column[:, None].to(tl.int64) * rows + row[None, :]
        tl.store(transposed + at, codes, mask=(column < columns)[:, None] & (row < rows)[None, :])


@triton.jit
def _block_encode_scale(
    y,  # [ROWS, COLUMNS] in registers; COLUMNS is a multiple of WIDTH, so no block is split between tiles
    scale,  # float32 or E8M0 [rows, ⌈columns / WIDTH⌉] row-major
    row, column_tile, rows, columns,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, ROUNDING: tl.constexpr, FLOOR: tl.constexpr, MARGIN: tl.constexpr,
    E8M0: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Encode scales of a tile's blocks of WIDTH along its rows, for each element: [ROWS, COLUMNS].

    Stores the blocks' decode scales too.
    """
    groups: tl.constexpr = COLUMNS // WIDTH
    magnitude, _ = finite_magnitude(y)
    amax = tl.max(tl.reshape(magnitude, (ROWS, groups, WIDTH)), axis=2)
    encode = encode_scale_from_amax(amax, MAX, MANTISSA, ROUNDING, FLOOR, MARGIN)
    group = column_tile * groups + tl.arange(0, groups)
    width = tl.cdiv(columns, WIDTH)
    at = row[:, None].to(tl.int64) * width + group[None, :]
    _store_scale(scale + at, encode, (row < rows)[:, None] & (group < width)[None, :], E8M0)
    return tl.reshape(tl.broadcast_to(encode[:, :, None], (ROWS, groups, WIDTH)), (ROWS, COLUMNS))


class Launch(NamedTuple):
    """A cast as arguments that every fused kernel takes."""

    made: ResultBuffers
    outputs: tuple[Tensor, Tensor, Tensor, Tensor]  # codes as uint8, scale, transposed codes as uint8, their scale
    measured: Tensor  # int32, zeros
    known: Tensor | None
    constants: dict[str, Any]  # of the format, the scale rule and the codes
    KNOWN: str
    GROUPS: int


def launch_of(x: Tensor, columns: int, cast: ResultCast, amax: Tensor | None, scale: Tensor | None) -> Launch:
    """Allocate a result with ``columns`` columns, and name what the kernels are told."""
    groups = cast.spec.granularity
    by_column = cast.transpose and isinstance(groups, PerRow)
    measured = x.new_zeros(COLUMN_AMAXES.value + columns if by_column else 2, dtype=torch.int32)
    made = new_buffers(x, columns, cast)._replace(measured=measured[:2] if by_column else measured)
    constants = format_constants(cast.spec.format) | {
        "ROUNDING": str(cast.spec.scale_rounding),
        "FLOOR": float(cast.spec.amax_floor),
        "MARGIN": cast.spec.margin,
        "E8M0": cast.spec.scale_format == E8M0,
        "PROPAGATE": cast.spec.nonfinite == Nonfinite.PROPAGATE,
        "HARDWARE": has_hardware_casts(x.device),
    }
    return Launch(
        made,
        (made.codes.view(torch.uint8), made.scale, made.transposed.view(torch.uint8), made.transposed_scale),
        measured,
        amax if scale is None else scale,
        constants,
        KNOWN="scale" if scale is not None else "amax" if amax is not None else "",
        GROUPS=groups.columns if isinstance(groups, PerBlock) else int(isinstance(groups, PerRow)),
    )


def row_launch(columns: int) -> dict[str, int]:
    """The launch of programs that hold rows of ``columns``: SIZE, a power of two, and warps, 16 numbers a thread."""
    size = max(LEAST_PER_WARP, launching.next_power_of_2(columns))
    return {"SIZE": size, "num_warps": max(1, min(32, size // 512))}


def tile(groups: int, *, direct: bool) -> dict[str, int]:
    """The tile of a program, and its warps. 128 rows fill a line of the transpose; smaller blocks leave room for 64.

    Blocks of 128 along a row, which only ``direct`` codes have, need as many columns.
    """
    if groups == 128 and direct:  # 16 numbers a thread, as for tiles of 64 x 64; 32 for 128 x 64
        return {"ROWS": 128, "COLUMNS": 128, "num_warps": 32}
    return {"ROWS": 64 if ROW.value < groups < 128 else 128, "COLUMNS": 64, "num_warps": 8}


def tiles(groups: int, rows: int, columns: int, *, direct: bool) -> tuple[int]:
    """The grid: how many tiles cover a matrix."""
    shape = tile(groups, direct=direct)
    return (launching.ceil_div(rows, shape["ROWS"]) * launching.ceil_div(columns, shape["COLUMNS"]),)

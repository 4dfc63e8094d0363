"""RMSNorm and LayerNorm with the cast of their result, and their backward; the result itself is never written.

    y = (x - mean) · rstd · gain + bias,    rstd = 1 / sqrt(variance + eps)

in FP32, one operation after the other as written here, without fused multiply-adds: both kernels below, and a
recomputation from the same ``rstd``, find the same bits. RMSNorm has no mean and no bias, and its variance is the mean
square. x is [R, H]; y is rounded to the dtype that the unfused norm would hand on, then cast.

| cast               | rows kernel: reads x, writes   | tiles kernel: reads x, writes | bytes an element (16-bit x) |
|--------------------|--------------------------------|-------------------------------|-----------------------------|
| per tensor         | rstd, amax                     | codes in both orientations    | 2 + 2 + 1 + 1               |
| per row            | rstd, codes, column amaxes     | codes of the transpose        | 2 + 1 + 2 + 1               |
| in blocks along K  | rstd                           | codes in both orientations    | 2 + 2 + 1 + 1               |

A norm followed by its cast would write and read y besides. Without the transpose, which only a weight's gradient needs,
a cast per row ends with the first kernel. The other casts cannot end there: a transpose is written in tiles of many
rows, and a program for every 128 whole rows would leave half of the GPU idle.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.result_cast import NormSpec, ResultBuffers, ResultCast
from octavo.kernels.triton import epilogues, launching
from octavo.kernels.triton.codes import finite_magnitude, reciprocal, round_to
from octavo.kernels.triton.epilogues import COLUMN_AMAXES, ROW, add_to_found, cast_row, cast_tile

__all__ = ["cast_norm", "norm_backward"]

# How many programs share the rows, whatever the device, so that sums are the same everywhere: 16 on each of an H100's
# multiprocessors, or the 3 whose registers it holds at H = 4096 where each also sums up columns.
_PROGRAMS, _WITH_COLUMNS, _BACKWARD_PROGRAMS = 2112, 396, 396
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _gain_and_bias(gain, bias, at, inside, HAS_BIAS: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    """The norm's parameters in FP32; no bias is a 0 that nobody adds."""
    w = tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        w += 1.0
    b = w
    if HAS_BIAS:
        b = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    return w, b


@triton.jit
def _normalised(number, mean, rstd, w, b, LAYER: tl.constexpr, HAS_BIAS: tl.constexpr):
    y = number - mean if LAYER else number
    y = y * rstd * w
    return y + b if HAS_BIAS else y


@triton.jit
def _norm_rows_kernel(
    x, gain, bias, mean, rstd, output, output_scale, found, rows, columns, rows_each,
    LAYER: tl.constexpr, EPS: tl.constexpr, HAS_BIAS: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    HANDED_ON: tl.constexpr, CAST_ROWS: tl.constexpr, COLUMN_AMAX: tl.constexpr,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, ROUNDING: tl.constexpr, FLOOR: tl.constexpr,
    MARGIN: tl.constexpr, E8M0: tl.constexpr, PROPAGATE: tl.constexpr, HARDWARE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """A program takes ``rows_each`` whole rows, one after the other in registers."""
    at = tl.arange(0, SIZE)
    inside = at < columns
    largest = tl.zeros([SIZE], tl.float32)
    PACK: tl.constexpr = min(8, SIZE)  # what a thread holds side by side is counted together: fewer registers
    broken = tl.zeros([SIZE // PACK], tl.int32)
    first = tl.program_id(0) * rows_each
    for step in range(tl.minimum(rows_each, rows - first)):
        row = first + step
        number = tl.load(x + row.to(tl.int64) * columns + at, mask=inside, other=0.0).to(tl.float32)
        middle = 0.0
        centred = number
        if LAYER:
            middle = tl.sum(number, axis=0) / columns
            centred = tl.where(inside, number - middle, 0.0)
            tl.store(mean + row, middle)
        variance = tl.sum(centred * centred, axis=0, keep_dims=True) / columns
        spread = reciprocal(tl.sqrt_rn(variance + EPS))
        tl.store(rstd + row + tl.arange(0, 1), spread)
        w, b = _gain_and_bias(gain, bias, at, inside, HAS_BIAS, ZERO_CENTERED)  # every time: L1 has more room
        y = _normalised(number, middle, spread, w, b, LAYER, HAS_BIAS)
        y = tl.where(inside, round_to(y, HANDED_ON).to(tl.float32), 0.0)
        magnitude, nonfinite = finite_magnitude(y)
        broken += tl.sum(tl.reshape(nonfinite, (SIZE // PACK, PACK)), axis=1)
        if COLUMN_AMAX or not CAST_ROWS:
            largest = tl.maximum(largest, magnitude)
        if CAST_ROWS:
            cast_row(
                y, magnitude, row, at, inside, columns, output, output_scale,
                MAX, MANTISSA, BIAS, ROUNDING, FLOOR, MARGIN, E8M0, PROPAGATE, HARDWARE,
            )  # fmt: skip
    add_to_found(found, tl.max(largest, axis=0), tl.sum(broken, axis=0))
    if COLUMN_AMAX:
        tl.atomic_max(found + COLUMN_AMAXES + at, largest.to(tl.int32, bitcast=True), mask=inside, sem="relaxed")


@triton.jit
def _norm_tiles_kernel(
    x, gain, bias, mean, rstd, output, output_scale, transposed, transposed_scale, found, known,
    rows, columns, LAYER: tl.constexpr, HAS_BIAS: tl.constexpr, ZERO_CENTERED: tl.constexpr, HANDED_ON: tl.constexpr,
    KNOWN: tl.constexpr, GROUPS: tl.constexpr, DIRECT: tl.constexpr, TRANSPOSE: tl.constexpr,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, ROUNDING: tl.constexpr, FLOOR: tl.constexpr,
    MARGIN: tl.constexpr, E8M0: tl.constexpr, PROPAGATE: tl.constexpr, HARDWARE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program takes a tile [ROWS, COLUMNS] and knows its rows' mean and rstd."""
    across = tl.cdiv(columns, COLUMNS)
    row_tile, column_tile = tl.program_id(0) // across, tl.program_id(0) % across
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    number = tl.load(x + row[:, None].to(tl.int64) * columns + column[None, :], mask=inside, other=0.0).to(tl.float32)
    w, b = _gain_and_bias(gain, bias, column, column < columns, HAS_BIAS, ZERO_CENTERED)
    spread = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
    middle = tl.load(mean + row, mask=row < rows, other=0.0)[:, None] if LAYER else 0.0
    y = _normalised(number, middle, spread, w[None, :], b[None, :], LAYER, HAS_BIAS)
    y = tl.where(inside, round_to(y, HANDED_ON).to(tl.float32), 0.0)
    cast_tile(
        y, row_tile, column_tile, rows, columns, output, output_scale, transposed, transposed_scale,
        found, known, KNOWN, GROUPS, DIRECT, TRANSPOSE,
        MAX, MANTISSA, BIAS, ROUNDING, FLOOR, MARGIN, E8M0, PROPAGATE, HARDWARE, ROWS, COLUMNS,
    )  # fmt: skip


@triton.jit
def _norm_backward_kernel(
    grad_y, x, gain, mean, rstd, grad_x, gain_parts, bias_parts, rows, columns, rows_each,
    LAYER: tl.constexpr, HAS_BIAS: tl.constexpr, ZERO_CENTERED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """A program takes ``rows_each`` whole rows and writes its sums for the parameters as a row of the parts."""
    at = tl.arange(0, SIZE)
    inside = at < columns
    gain_sum = tl.zeros([SIZE], tl.float32)
    bias_sum = tl.zeros([SIZE], tl.float32)
    first = tl.program_id(0) * rows_each
    for step in range(tl.minimum(rows_each, rows - first)):
        row = first + step
        here = row.to(tl.int64) * columns + at
        number = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_y + here, mask=inside, other=0.0).to(tl.float32)
        spread = tl.load(rstd + row)
        if LAYER:
            number = tl.where(inside, number - tl.load(mean + row), 0.0)
        unit = number * spread
        gain_sum += grad * unit
        if HAS_BIAS:
            bias_sum += grad
        w, _ = _gain_and_bias(gain, gain, at, inside, False, ZERO_CENTERED)  # every time: L1 has more room
        inner = grad * w
        slope = inner - unit * (tl.sum(inner * unit, axis=0) / columns)
        if LAYER:
            slope -= tl.sum(inner, axis=0) / columns
        tl.store(grad_x + here, round_to(slope * spread, grad_x.dtype.element_ty), mask=inside)
    part = tl.program_id(0).to(tl.int64) * columns + at
    tl.store(gain_parts + part, gain_sum, mask=inside)
    if HAS_BIAS:
        tl.store(bias_parts + part, bias_sum, mask=inside)


def cast_norm(
    x: Tensor,
    gain: Tensor,
    bias: Tensor | None,
    norm: NormSpec,
    cast: ResultCast,
    *,
    handed_on: torch.dtype,
    amax: Tensor | None,
    scale: Tensor | None,
) -> tuple[ResultBuffers, Tensor, Tensor]:
    """See :func:`octavo.kernels.fused_casts.cast_norm`."""
    rows, columns = x.shape
    launch = epilogues.launch_of(x, columns, cast, amax, scale)
    mean, rstd = (x.new_empty(size, dtype=torch.float32) for size in (rows if norm.layer else 0, rows))
    flags = {
        "LAYER": norm.layer,
        "HAS_BIAS": bias is not None,
        "ZERO_CENTERED": norm.zero_centered,
        "HANDED_ON": _TYPES[handed_on],
        **launch.constants,
        **epilogues.PLAIN_ARITHMETIC,
    }
    parameters = gain, gain if bias is None else bias, mean, rstd
    by_row = launch.GROUPS == ROW.value
    rows_each = launching.ceil_div(rows, _WITH_COLUMNS if by_row and cast.transpose else _PROGRAMS)
    with launching.on_device_of(x):
        launching.launch(
            _norm_rows_kernel,
            (launching.ceil_div(rows, rows_each),),
            *(x, *parameters, *launch.outputs[:2], launch.found),
            *(rows, columns, rows_each),
            EPS=norm.eps,
            CAST_ROWS=by_row and cast.direct,
            COLUMN_AMAX=by_row and cast.transpose,
            **flags,
            **epilogues.row_launch(columns),
        )
        if not by_row or cast.transpose:
            launching.launch(
                _norm_tiles_kernel,
                epilogues.tiles(launch.GROUPS, rows, columns, direct=cast.direct),
                *(x, *parameters, *launch.outputs, launch.found, launch.known, rows, columns),
                KNOWN=launch.KNOWN,
                GROUPS=launch.GROUPS,
                DIRECT=cast.direct,
                TRANSPOSE=cast.transpose,
                **flags,
                **epilogues.tile(launch.GROUPS, direct=cast.direct),
            )
    return launch.made, mean, rstd


def norm_backward(
    grad_y: Tensor, x: Tensor, gain: Tensor, mean: Tensor, rstd: Tensor, norm: NormSpec, *, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`octavo.kernels.fused_casts.norm_backward`; the parts are summed in a fixed order.

    Bytes an element, 16-bit: 2 + 2 read, 2 written, and 4 or 8 bytes a column for each of 396 programs.
    """
    rows, columns = x.shape
    rows_each = launching.ceil_div(rows, _BACKWARD_PROGRAMS)
    programs = launching.ceil_div(rows, rows_each)
    grad_x = torch.empty_like(x)
    gain_parts, bias_parts = (
        x.new_empty((programs, size), dtype=torch.float32) for size in (columns, columns if has_bias else 0)
    )
    with launching.on_device_of(x):
        launching.launch(
            _norm_backward_kernel,
            (programs,),
            *(grad_y, x, gain, mean, rstd, grad_x, gain_parts, bias_parts, rows, columns, rows_each),
            LAYER=norm.layer,
            HAS_BIAS=has_bias,
            ZERO_CENTERED=norm.zero_centered,
            **epilogues.row_launch(columns),
        )
    return grad_x, gain_parts.sum(0), bias_parts.sum(0)

"""RMSNorm and LayerNorm fused with the cast of their result, and their backward; the result itself is never written.

    y = (x - mean) · rstd · gain + bias,    rstd = 1 / sqrt(variance + eps),    codes = RNE(y · encode)

in FP32, one operation after the other as written here, without fused multiply-adds: both kernels below, and a
recomputation from the same ``rstd``, find the same bits. RMSNorm has no mean and no bias, and its variance is the mean
square. x is [R, H] row-major; y is rounded to the dtype of the unfused norm's output, then cast.

| cast               | rows kernel: reads x, writes   | tiles kernel: reads x, writes | bytes an element (16-bit x) |
|--------------------|--------------------------------|-------------------------------|-----------------------------|
| per tensor         | rstd, amax                     | codes in both orientations    | 2 + 2 + 1 + 1               |
| per row            | rstd, codes, column amaxes     | codes of the transpose        | 2 + 1 + 2 + 1               |
| in blocks along K  | rstd                           | codes in both orientations    | 2 + 2 + 1 + 1               |

A norm followed by a separate cast would write and read y besides. Without the transpose, which only a weight's gradient
needs, a cast per row ends with the first kernel. The other casts cannot end there: a transpose is written in tiles of
many rows, and a program for every 128 whole rows would leave half of the GPU idle.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.result_cast import NormSpec, ResultBuffers, ResultCast
from octavo.kernels.triton import epilogues, launching
from octavo.kernels.triton.codes import finite_magnitude, reciprocal, round_to
from octavo.kernels.triton.epilogues import COLUMN_AMAXES, ROW, add_measurement, cast_row, cast_tile

__all__ = ["cast_norm", "norm_backward"]

# Number of programs that share the rows, whatever the device, so that sums are the same everywhere: 16 on each of an
# H100's multiprocessors, or the 3 whose registers it holds at H = 4096 where each also sums up columns.
_PROGRAMS, _WITH_COLUMNS, _BACKWARD_PROGRAMS = 2112, 396, 396
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _gain_and_bias(gain, bias, at, inside, HAS_BIAS: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    """The norm's parameters in FP32, at columns ``at``; the second means nothing without a bias."""
    w = tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
    if ZERO_CENTERED:  # stored as w - 1, so that weight decay pulls towards 1
        w += 1.0
    b = w  # a tuple needs some value; _normalised does not read it
    if HAS_BIAS:
        b = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    return w, b


@triton.jit
def _normalised(number, mean, rstd, w, b, LAYER: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Y before it is rounded: one function, so that both kernels have the same operations in the same order."""
    y = number - mean if LAYER else number
    y = y * rstd * w
    return y + b if HAS_BIAS else y


@triton.jit
def _norm_rows_kernel(
    x,  # [rows, columns] row-major
    gain, bias,  # [columns]
    mean, rstd,  # float32 [rows]: written; no mean of an RMSNorm
    output, output_scale,  # uint8 codes [rows, columns] row-major; float32 or E8M0 [rows, 1]; written with CAST_ROWS
    measured,  # int32 [2], or [COLUMN_AMAXES + columns], zeros: see epilogues.py
    rows, columns, rows_each,
    LAYER: tl.constexpr, EPS: tl.constexpr, HAS_BIAS: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    RESULT_DTYPE: tl.constexpr, CAST_ROWS: tl.constexpr, COLUMN_AMAX: tl.constexpr,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, ROUNDING: tl.constexpr, FLOOR: tl.constexpr,
    MARGIN: tl.constexpr, E8M0: tl.constexpr, PROPAGATE: tl.constexpr, HARDWARE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Statistics and amaxes of y; its rows cast where each has a scale of its own (CAST_ROWS).

    A program owns ``rows_each`` whole rows, one after the other in registers, so that mean and variance take no second
    reading. COLUMN_AMAX: it keeps its columns' amaxes beside the row, for the transpose.
    """
    at = tl.arange(0, SIZE)
    inside = at < columns
    largest = tl.zeros([SIZE], tl.float32)
    PACK: tl.constexpr = min(8, SIZE)  # what a thread holds side by side is counted together: fewer registers
    nonfinite_count = tl.zeros([SIZE // PACK], tl.int32)
    first = tl.program_id(0) * rows_each
    for step in range(tl.minimum(rows_each, rows - first)):
        row = first + step
        # int64: row * columns may exceed int32.
        number = tl.load(x + row.to(tl.int64) * columns + at, mask=inside, other=0.0).to(tl.float32)
        middle = 0.0
        centred = number
        if LAYER:
            middle = tl.sum(number, axis=0) / columns
            # 0 beyond the row's end again, or each place there would add mean² to the sum of squares. Squares of the
            # centred numbers, not E[x²] - mean²: that difference cancels where the mean is large.
            centred = tl.where(inside, number - middle, 0.0)
            tl.store(mean + row, middle)
        variance = tl.sum(centred * centred, axis=0, keep_dims=True) / columns
        spread = reciprocal(tl.sqrt_rn(variance + EPS))  # not rsqrt, which is approximate on the device
        tl.store(rstd + row + tl.arange(0, 1), spread)
        w, b = _gain_and_bias(gain, bias, at, inside, HAS_BIAS, ZERO_CENTERED)  # every time: L1 has more room
        y = _normalised(number, middle, spread, w, b, LAYER, HAS_BIAS)
        # Rounded as the unfused norm's output is. Beyond the row's end a LayerNorm with a zero-centred gain makes
        # -mean · rstd, which must not raise an amax: 0 instead.
        y = tl.where(inside, round_to(y, RESULT_DTYPE).to(tl.float32), 0.0)
        magnitude, nonfinite = finite_magnitude(y)
        nonfinite_count += tl.sum(tl.reshape(nonfinite, (SIZE // PACK, PACK)), axis=1)
        # A running maximum a column: the columns' amaxes, or after the loop the tensor's. Rows' scales need neither.
        if COLUMN_AMAX or not CAST_ROWS:
            largest = tl.maximum(largest, magnitude)
        if CAST_ROWS:
            cast_row(
                y, magnitude, row, at, inside, columns, output, output_scale,
                MAX, MANTISSA, BIAS, ROUNDING, FLOOR, MARGIN, E8M0, PROPAGATE, HARDWARE,
            )  # fmt: skip
    add_measurement(measured, tl.max(largest, axis=0), tl.sum(nonfinite_count, axis=0))
    if COLUMN_AMAX:  # other programs have other rows of the same columns
        tl.atomic_max(measured + COLUMN_AMAXES + at, largest.to(tl.int32, bitcast=True), mask=inside, sem="relaxed")


@triton.jit
def _norm_tiles_kernel(
    x,  # [rows, columns] row-major
    gain, bias,  # [columns]
    mean, rstd,  # float32 [rows] of _norm_rows_kernel
    output, output_scale,  # uint8 codes [rows, columns] row-major; scale in the granularity's shape
    transposed, transposed_scale,  # uint8 codes [columns, rows] row-major; scale in the transpose's shape
    measured, known,  # int32, see epilogues.py; float32, one element, by KNOWN
    rows, columns, LAYER: tl.constexpr, HAS_BIAS: tl.constexpr, ZERO_CENTERED: tl.constexpr, RESULT_DTYPE: tl.constexpr,
    KNOWN: tl.constexpr, GROUPS: tl.constexpr, DIRECT: tl.constexpr, TRANSPOSE: tl.constexpr,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, ROUNDING: tl.constexpr, FLOOR: tl.constexpr,
    MARGIN: tl.constexpr, E8M0: tl.constexpr, PROPAGATE: tl.constexpr, HARDWARE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute y once more, from the stored mean and rstd, and cast it in either order or both.

    A program owns a tile [ROWS, COLUMNS]. It reads mean and rstd instead of whole rows, so that a tile can have the
    many rows that a transpose needs to fill lines of memory.
    """
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
    y = tl.where(inside, round_to(y, RESULT_DTYPE).to(tl.float32), 0.0)
    cast_tile(
        y, row_tile, column_tile, rows, columns, output, output_scale, transposed, transposed_scale,
        measured, known, KNOWN, GROUPS, DIRECT, TRANSPOSE,
        MAX, MANTISSA, BIAS, ROUNDING, FLOOR, MARGIN, E8M0, PROPAGATE, HARDWARE, ROWS, COLUMNS,
    )  # fmt: skip


@triton.jit
def _norm_backward_kernel(
    grad_y, x,  # [rows, columns] row-major
    gain,  # [columns]
    mean, rstd,  # float32 [rows] of _norm_rows_kernel
    grad_x,  # [rows, columns] row-major, x's dtype
    gain_parts, bias_parts,  # float32 [programs, columns] row-major: each program's sums over its rows
    rows, columns, rows_each,
    LAYER: tl.constexpr, HAS_BIAS: tl.constexpr, ZERO_CENTERED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Gradients of x and, as partial sums, of gain and bias.

        unit = (x - mean) · rstd,  inner = grad_y · gain
        grad_x = rstd · (inner - unit · mean(inner · unit) - mean(inner)),  the last term for LayerNorm alone
        grad_gain = Σ_rows grad_y · unit,  grad_bias = Σ_rows grad_y

    A program owns ``rows_each`` whole rows and writes its sums for the parameters as a row of the parts, which torch
    adds: without atomic additions the order of the sums, and so every bit, is the same each time.
    """
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
        if LAYER:  # 0 beyond the row's end, as in forward
            number = tl.where(inside, number - tl.load(mean + row), 0.0)
        unit = number * spread
        gain_sum += grad * unit
        if HAS_BIAS:
            bias_sum += grad
        w, _ = _gain_and_bias(gain, gain, at, inside, False, ZERO_CENTERED)  # every time: L1 has more room
        inner = grad * w
        slope = inner - unit * (tl.sum(inner * unit, axis=0) / columns)  # rstd depends on every x of the row
        if LAYER:  # so does the mean
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
    result_dtype: torch.dtype,
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
        "RESULT_DTYPE": _TYPES[result_dtype],
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
            *(x, *parameters, *launch.outputs[:2], launch.measured),
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
                *(x, *parameters, *launch.outputs, launch.measured, launch.known, rows, columns),
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

"""Activations of an MLP fused with the cast of their result, and their backward; the result itself is never written.

    y = f(x),  or  y = f(gate) · up  with  x = [gate, up];        codes = RNE(y · encode)

x is [R, F] or, gated, [R, 2F], row-major, with the gate's half first in each row; y is [R, F]. Computed in FP32 and
rounded to x's dtype where the unfused layer rounds: after f, and after the product; then cast.

| cast                    | rows kernel: reads x, writes | tiles kernel: reads x, writes | bytes, 16-bit, gated |
|-------------------------|------------------------------|-------------------------------|----------------------|
| per tensor, dynamic     | amax                         | codes in both orientations    | 4 + 4 + 1 + 1        |
| per tensor, known scale | nothing, and reads nothing   | codes in both orientations    | 4 + 1 + 1            |
| per row                 | codes, column amaxes         | codes of the transpose        | 4 + 1 + 4 + 1        |
| in blocks along K       | (not run)                    | codes in both orientations    | 4 + 1 + 1            |

Bytes are those of an element of y. An activation followed by a separate cast would write and read y besides. Without
the transpose, which only a weight's gradient needs, a cast per row ends with the first kernel. In training
octavo.nn.fused requests the transpose alone, in backward: that reads x once more, and keeps no codes from forward.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.result_cast import ResultBuffers, ResultCast
from octavo.kernels.triton import epilogues, launching
from octavo.kernels.triton.codes import finite_magnitude, round_to
from octavo.kernels.triton.epilogues import COLUMN_AMAXES, ROW, TENSOR, add_measurement, cast_row, cast_tile

__all__ = ["activation_backward", "cast_activation"]

# Programs that share the rows: 16 on each of an H100's 132 multiprocessors; 3 where each also holds the amaxes of its
# columns in registers, see norms.py.
_PROGRAMS, _WITH_COLUMNS = 2112, 396
_MEASURED_AT_ONCE = 4096  # columns of a program that only measures: it needs no whole rows

_SQRT_HALF: tl.constexpr = tl.constexpr(0.7071067811865476)
_NORMAL_PEAK: tl.constexpr = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)
_TANH_SLOPE: tl.constexpr = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi), since (1 + tanh(k/2)) / 2 = sigmoid(k)
_TANH_CUBE: tl.constexpr = tl.constexpr(0.044715)
_QUICK_SLOPE: tl.constexpr = tl.constexpr(1.702)


@triton.jit
def _tanh_argument(x):
    """K such that gelu_tanh(x) = x · sigmoid(k): tanh by exp, since (1 + tanh(k / 2)) / 2 = sigmoid(k)."""
    return (x * x * x * _TANH_CUBE + x) * _TANH_SLOPE


@triton.jit
def _function(x, NAME: tl.constexpr, DTYPE: tl.constexpr):
    """f(x) in FP32, rounded to DTYPE."""
    if NAME == "relu":
        y = tl.where(x <= 0, 0.0, x)  # NaN stays NaN
    elif NAME == "srelu":
        y = tl.where(x <= 0, 0.0, x)
        y = y * y
    elif NAME == "gelu":
        y = x * 0.5 * (1.0 + tl.math.erf(x * _SQRT_HALF))
    elif NAME == "silu":
        y = x / (1.0 + tl.exp(-x))  # exp(-x) = Inf of very negative x makes -0, the limit
    elif NAME == "gelu_tanh":
        y = x / (1.0 + tl.exp(-_tanh_argument(x)))
    else:
        tl.static_assert(NAME == "qgelu")
        # x · sigmoid(1.702 x) is three operations in torch, each of which rounds to the dtype.
        inner = round_to(x * _QUICK_SLOPE, DTYPE).to(tl.float32)
        y = x * round_to(1.0 / (1.0 + tl.exp(-inner)), DTYPE).to(tl.float32)
    return round_to(y, DTYPE).to(tl.float32)


@triton.jit
def _function_and_slope(x, NAME: tl.constexpr):
    """f(x) and its derivative in FP32, neither rounded: only gradients are made of them."""
    if NAME == "relu":
        y = tl.where(x <= 0, 0.0, x)
        slope = tl.where(x <= 0, 0.0, 1.0)
    elif NAME == "srelu":
        y = tl.where(x <= 0, 0.0, x)
        slope = 2.0 * y
        y = y * y
    elif NAME == "gelu":
        # d/dx x · Φ(x) = Φ(x) + x · φ(x), of the normal distribution.
        area = 0.5 * (1.0 + tl.math.erf(x * _SQRT_HALF))
        y = x * area
        slope = area + x * tl.exp(x * x * -0.5) * _NORMAL_PEAK
    else:
        # The others are x · σ(k(x)): with σ' = σ · (1 - σ) the derivative is σ + x · σ · (1 - σ) · k'(x).
        inner = x
        inner_slope = tl.full(x.shape, 1.0, tl.float32)
        if NAME == "gelu_tanh":
            inner = _tanh_argument(x)
            inner_slope = (x * x * (3.0 * _TANH_CUBE) + 1.0) * _TANH_SLOPE
        elif NAME == "qgelu":
            inner = x * _QUICK_SLOPE
            inner_slope = tl.full(x.shape, _QUICK_SLOPE, tl.float32)
        area = 1.0 / (1.0 + tl.exp(-inner))
        y = x * area
        slope = area + y * (1.0 - area) * inner_slope
    return y, slope


@triton.jit
def _activated(x, row, at, inside, columns, NAME: tl.constexpr, GATED: tl.constexpr):
    """Y at columns ``at`` of one row, or of rows [ROWS, 1]; 0 where not ``inside``.

    f(0) is 0 for every function here, so that masked loads of 0 raise no amax.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    # int64: a row's place exceeds int32 in a tensor of 2^31 elements. A gated row of x is twice as long as y's.
    here = row.to(tl.int64) * (columns * (2 if GATED else 1)) + at
    y = _function(tl.load(x + here, mask=inside, other=0.0).to(tl.float32), NAME, DTYPE)
    if GATED:
        up = tl.load(x + here + columns, mask=inside, other=0.0).to(tl.float32)
        y = round_to(y * up, DTYPE).to(tl.float32)
    return y


@triton.jit
def _activation_rows_kernel(
    x,  # [rows, columns], gated [rows, 2 · columns], row-major
    output, output_scale,  # uint8 codes [rows, columns] row-major; float32 or E8M0 [rows, 1]; written with CAST_ROWS
    measured,  # int32 [2], or [COLUMN_AMAXES + columns], zeros: see epilogues.py
    known,  # float32, one element, the amax of past steps, or None
    rows, columns, rows_each,  # of the result; rows of each program
    NAME: tl.constexpr, GATED: tl.constexpr, KNOWN: tl.constexpr, CAST_ROWS: tl.constexpr, COLUMN_AMAX: tl.constexpr,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, ROUNDING: tl.constexpr, FLOOR: tl.constexpr,
    MARGIN: tl.constexpr, E8M0: tl.constexpr, PROPAGATE: tl.constexpr, HARDWARE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Measure y, and cast its rows where each has a scale of its own (CAST_ROWS); COLUMN_AMAX: measure columns too.

    A program owns SIZE columns of ``rows_each`` rows, one row after the other in registers; with CAST_ROWS or
    COLUMN_AMAX SIZE covers whole rows. It does nothing where an amax is known.
    """
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = at < columns
    largest = tl.zeros([SIZE], tl.float32)
    PACK: tl.constexpr = min(8, SIZE)  # what a thread holds side by side is counted together: fewer registers
    nonfinite_count = tl.zeros([SIZE // PACK], tl.int32)
    first = tl.program_id(0) * rows_each
    count = tl.minimum(rows_each, rows - first)
    if KNOWN == "amax":  # decided on the device: the host would have to wait for the value
        count = tl.where(tl.load(known) > 0, 0, count)
    for step in range(count):
        row = first + step
        y = _activated(x, row, at, inside, columns, NAME, GATED)
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
    if count > 0:
        add_measurement(measured, tl.max(largest, axis=0), tl.sum(nonfinite_count, axis=0))
    if COLUMN_AMAX:  # other programs have other rows of the same columns
        tl.atomic_max(measured + COLUMN_AMAXES + at, largest.to(tl.int32, bitcast=True), mask=inside, sem="relaxed")


@triton.jit
def _activation_tiles_kernel(
    x,  # [rows, columns], gated [rows, 2 · columns], row-major
    output, output_scale,  # uint8 codes [rows, columns] row-major; scale in the granularity's shape
    transposed, transposed_scale,  # uint8 codes [columns, rows] row-major; scale in the transpose's shape
    measured, known,  # int32, see epilogues.py; float32, one element, by KNOWN
    rows, columns,  # of the result
    NAME: tl.constexpr, GATED: tl.constexpr,
    KNOWN: tl.constexpr, GROUPS: tl.constexpr, DIRECT: tl.constexpr, TRANSPOSE: tl.constexpr,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, ROUNDING: tl.constexpr, FLOOR: tl.constexpr,
    MARGIN: tl.constexpr, E8M0: tl.constexpr, PROPAGATE: tl.constexpr, HARDWARE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute y once more and cast it, in either order or both.

    A program owns a tile [ROWS, COLUMNS] of y, and measures it unless ``_activation_rows_kernel`` did.
    """
    across = tl.cdiv(columns, COLUMNS)
    row_tile, column_tile = tl.program_id(0) // across, tl.program_id(0) % across
    row = (row_tile * ROWS + tl.arange(0, ROWS))[:, None]
    column = (column_tile * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < columns)
    y = _activated(x, row, column, inside, columns, NAME, GATED)
    if KNOWN != "" or GROUPS > ROW:
        magnitude, nonfinite = finite_magnitude(y)
        amax, count = tl.max(magnitude), tl.sum(nonfinite)
        # Where the known amax is 0, the rows kernel has measured this tensor: nothing is counted twice.
        if KNOWN == "amax":
            unmeasured = tl.load(known) > 0
            amax = tl.where(unmeasured, amax, 0.0)
            count = tl.where(unmeasured, count, 0)
        add_measurement(measured, amax, count)
    cast_tile(
        y, row_tile, column_tile, rows, columns, output, output_scale, transposed, transposed_scale,
        measured, known, KNOWN, GROUPS, DIRECT, TRANSPOSE,
        MAX, MANTISSA, BIAS, ROUNDING, FLOOR, MARGIN, E8M0, PROPAGATE, HARDWARE, ROWS, COLUMNS,
    )  # fmt: skip


@triton.jit
def _activation_backward_kernel(
    grad_y,  # [rows, columns] row-major
    x, grad_x,  # [rows, columns], gated [rows, 2 · columns], row-major
    columns, NAME: tl.constexpr, GATED: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """grad_x = grad_y · f'(x); gated, grad_gate = grad_y · up · f'(gate) and grad_up = grad_y · f(gate).

    In FP32 from the inputs to the one rounding of each gradient. A program owns SIZE columns of one row; y and f' are
    recomputed from x, so that forward keeps x alone.
    """
    across = tl.cdiv(columns, SIZE)
    row = tl.program_id(0) // across
    at = tl.program_id(0) % across * SIZE + tl.arange(0, SIZE)
    inside = at < columns
    grad = tl.load(grad_y + row.to(tl.int64) * columns + at, mask=inside, other=0.0).to(tl.float32)
    here = row.to(tl.int64) * (columns * (2 if GATED else 1)) + at
    y, slope = _function_and_slope(tl.load(x + here, mask=inside, other=0.0).to(tl.float32), NAME)
    DTYPE: tl.constexpr = grad_x.dtype.element_ty
    if GATED:
        up = tl.load(x + here + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + here + columns, round_to(grad * y, DTYPE), mask=inside)  # of the up half
        grad = grad * up
    tl.store(grad_x + here, round_to(grad * slope, DTYPE), mask=inside)


def cast_activation(
    x: Tensor, function: str, cast: ResultCast, *, gated: bool, amax: Tensor | None, scale: Tensor | None
) -> ResultBuffers:
    """See :func:`octavo.kernels.fused_casts.cast_activation`."""
    rows, columns = x.shape[0], x.shape[1] // 2 if gated else x.shape[1]
    launch = epilogues.launch_of(x, columns, cast, amax, scale)
    flags = {
        "NAME": function,
        "GATED": gated,
        "KNOWN": launch.KNOWN,
        **launch.constants,
        **epilogues.PLAIN_ARITHMETIC,
    }
    by_row = launch.GROUPS == ROW.value
    with launching.on_device_of(x):
        if by_row or (launch.GROUPS == TENSOR.value and scale is None):
            shape = epilogues.row_launch(columns if by_row else min(columns, _MEASURED_AT_ONCE))
            across = launching.ceil_div(columns, shape["SIZE"])
            rows_each = launching.ceil_div(rows * across, _WITH_COLUMNS if by_row and cast.transpose else _PROGRAMS)
            launching.launch(
                _activation_rows_kernel,
                (launching.ceil_div(rows, rows_each), across),
                *(
                    x,
                    *launch.outputs[:2],
                    launch.measured,
                    launch.known,
                    rows,
                    columns,
                    rows_each,
                ),
                CAST_ROWS=by_row and cast.direct,
                COLUMN_AMAX=by_row and cast.transpose,
                **flags,
                **shape,
            )
        if not by_row or cast.transpose:
            launching.launch(
                _activation_tiles_kernel,
                epilogues.tiles(launch.GROUPS, rows, columns, direct=cast.direct),
                *(x, *launch.outputs, launch.measured, launch.known, rows, columns),
                GROUPS=launch.GROUPS,
                DIRECT=cast.direct,
                TRANSPOSE=cast.transpose,
                **flags,
                **epilogues.tile(launch.GROUPS, direct=cast.direct),
            )
    return launch.made


def activation_backward(grad_y: Tensor, x: Tensor, function: str, *, gated: bool) -> Tensor:
    """See :func:`octavo.kernels.fused_casts.activation_backward`.

    Bytes an element of y, 16-bit: 2 + 4 read and 4 written if gated, 2 + 2 and 2 if not.
    """
    rows, columns = grad_y.shape
    grad_x = torch.empty_like(x)
    size = launching.tile_side(columns, 1024)
    with launching.on_device_of(x):
        launching.launch(
            _activation_backward_kernel,
            (rows * launching.ceil_div(columns, size),),
            *(grad_y, x, grad_x, columns),
            NAME=function,
            GATED=gated,
            SIZE=size,
            num_warps=4,
        )
    return grad_x

"""Casts of several matrices with a scale for each, all in one launch: those of the experts of a layer.

    codes[i] = RNE(fp32(x[i]) · encode[i]),  encode[i] = MAX / max |x[i]|,  scale[i] = 1 / encode[i]

A launch before measures all matrices, unless their amaxes or scales are given and nothing is recorded. Tiles of all
matrices are numbered one after the other, and a program owns one. Matrices differ in their numbers of rows alone, and
codes lie one below the other. The arithmetic of an element is that of casts.py.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.errors import BackendError
from octavo.kernels.triton import casts, launching
from octavo.kernels.triton.casts import (
    add_count,
    as_stored,
    codes_of,
    first_of_tile,
    is_nonfinite,
    max_magnitude,
    zero_nonfinite,
)
from octavo.kernels.triton.codes import encode_scale_from_amax, reciprocal
from octavo.kernels.triton.problem_table import find_problem, problem_table
from octavo.numerics import CastSpec

__all__ = ["EachCast", "cast_matrices"]

_TILE = (32, 256)  # rows and columns of a program: 32 elements a thread
_WARPS = 8
_ALIGNMENT = 16  # bytes
_FP32_MAX: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def _tile_of_each(
    table, like, matrices, columns, stride,
    ALIGNED: tl.constexpr, MATRICES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program's entry and whether its tile is the first; indices of rows and columns, a mask, and numbers."""
    entry, first, _ = find_problem(table, matrices, tl.program_id(0), MATRICES)
    tile = tl.program_id(0) - first
    row, column = first_of_tile(tile, columns, ROWS, COLUMNS)
    inside = (row < tl.load(entry + 1))[:, None] & (column < columns)[None, :]
    x = tl.load(entry + 2).to(like.dtype)
    if ALIGNED:  # so that a thread loads several
        x = tl.multiple_of(x, 16)
    number = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    return entry, tile == 0, row, column, inside, number


@triton.jit
def measure_each_kernel(
    table,  # entries: tiles, rows, address, number of the matrix, its first row of codes
    like,  # the first matrix: all are of its dtype
    amaxes, nonfinite,  # int32 and int64 [matrices], zeros: raised to the bits of amaxes, and by counts of NaN and ±Inf
    matrices, columns, stride,
    ALIGNED: tl.constexpr, MATRICES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Amax of the finite elements, and number of the others, of each matrix. Reads x once."""
    entry, _, _, _, _, number = _tile_of_each(table, like, matrices, columns, stride, ALIGNED, MATRICES, ROWS, COLUMNS)
    at = tl.load(entry + 3)
    amax = max_magnitude(tl.ravel(number), 0)
    if is_nonfinite(amax):
        add_count(nonfinite + at, is_nonfinite(number))
        amax = max_magnitude(tl.ravel(zero_nonfinite(number)), 0)
    tl.atomic_max(
        amaxes + at, amax.to(tl.int32, bitcast=True), sem="relaxed"
    )  # in the order of the numbers: none is < 0


@triton.jit
def cast_each_kernel(
    table, like,  # as in measure_each_kernel
    out,  # codes of all, [all rows, columns] row-major, without gaps
    scales,  # float32 [matrices], decode scales: written
    given, amaxes,  # float32 [matrices]: amaxes or scales, by SOURCE; what was measured; or None
    matrices, columns, stride,
    SOURCE: tl.constexpr,
    ALIGNED: tl.constexpr, MATRICES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, ROUNDING: tl.constexpr, FLOOR: tl.constexpr,
    MARGIN: tl.constexpr, PROPAGATE: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Cast each matrix with its scale; SOURCE as in cast_tensor_kernel. Reads x once, writes a byte an element."""
    entry, is_first, row, column, inside, number = _tile_of_each(
        table, like, matrices, columns, stride, ALIGNED, MATRICES, ROWS, COLUMNS
    )
    at = tl.load(entry + 3) + tl.arange(0, 1)  # scale and amax are blocks [1]: the shared device functions take blocks
    if SOURCE == "scale":
        decode = tl.load(given + at)
        encode = tl.minimum(reciprocal(decode), _FP32_MAX)  # of a subnormal scale the reciprocal may be infinite
    else:
        if SOURCE == "measured":
            amax = tl.load(amaxes + at)
        else:
            amax = tl.load(given + at)
            if SOURCE == "known":
                amax = tl.where(amax > 0, amax, tl.load(amaxes + at))
        encode = encode_scale_from_amax(amax, MAX, MANTISSA, ROUNDING, FLOOR, MARGIN)
        decode = reciprocal(encode)
    tl.store(scales + at, decode, mask=is_first)
    codes = codes_of(number, encode[:, None], MAX, MANTISSA, BIAS, PROPAGATE, HARDWARE)
    place = (tl.load(entry + 4) + row)[:, None] * columns + column[None, :]
    tl.store(out + place, as_stored(codes, out), mask=inside)


class EachCast(NamedTuple):
    """Codes of all matrices, one below the other, and their scales, amaxes and counts of NaN and ±Inf, [matrices] each.

    Amaxes and counts are None if nothing was measured.
    """

    codes: Tensor
    scales: Tensor
    amaxes: Tensor | None
    nonfinite: Tensor | None


def cast_matrices(
    matrices: Sequence[Tensor],
    spec: CastSpec,
    *,
    amax: Tensor | None = None,
    scale: Tensor | None = None,
    measure_if_zero: bool = False,
    measure: bool = True,
) -> EachCast:
    """Cast several matrices, each with its own scale.

    Args:
        matrices: float32, bfloat16 or float16, not empty, of one dtype, width and row stride, columns side by side.
        spec: how to cast, with one scale a tensor.
        amax: float32 [matrices], to provide for instead of what is measured.
        scale: float32 [matrices], used as it is.
        measure_if_zero: whether a given amax of 0 means the measured one.
        measure: whether to measure where the scale does not need it.

    Raises:
        BackendError: matrices of different dtypes, widths or row strides.
    """
    _check(matrices)
    first, rows = matrices[0], [len(x) for x in matrices]
    device, columns = first.device, first.shape[1]
    source = "scale" if scale is not None else "measured" if amax is None else "known" if measure_if_zero else "amax"
    out = torch.empty(sum(rows), columns, dtype=spec.format.torch_dtype, device=device)
    scales = torch.empty(len(rows), dtype=torch.float32, device=device)
    entries = _entries(matrices, rows, columns)
    grid, sizes = (entries[-1][0],), (len(rows), columns, first.stride(0))
    options = {
        "ALIGNED": all(x.data_ptr() % _ALIGNMENT == 0 for x in matrices),
        "MATRICES": launching.next_power_of_2(len(rows)),
        "ROWS": _TILE[0],
        "COLUMNS": _TILE[1],
        "num_warps": _WARPS,
    }
    amaxes = nonfinite = None
    with launching.on_device_of(first):
        table = problem_table(entries, device)
        if measure or source in {"measured", "known"}:
            amaxes, nonfinite = (torch.zeros(len(rows), dtype=d, device=device) for d in (torch.float32, torch.int64))
            buffers = (amaxes.view(torch.int32), nonfinite)
            launching.launch(measure_each_kernel, grid, table, first, *buffers, *sizes, **options)
        launching.launch(
            cast_each_kernel, grid,
            table, first, casts.as_kernel_output(out), scales, scale if amax is None else amax, amaxes, *sizes,
            SOURCE=source, **options, **casts.constants(spec, device),
        )  # fmt: skip
    return EachCast(out, scales, amaxes, nonfinite)


def _check(matrices: Sequence[Tensor]) -> None:
    if len({(x.dtype, x.shape[1], x.stride()) for x in matrices}) > 1:
        raise BackendError("matrices that are cast in one launch have one dtype, width and row stride")


def _entries(matrices: Sequence[Tensor], rows: list[int], columns: int) -> list[tuple[int, ...]]:
    across = launching.ceil_div(columns, _TILE[1])
    ends = accumulate(launching.ceil_div(each, _TILE[0]) * across for each in rows)
    starts = accumulate(rows[:-1], initial=0)
    addresses = (x.data_ptr() for x in matrices)
    return list(zip(ends, rows, addresses, range(len(rows)), starts, strict=True))

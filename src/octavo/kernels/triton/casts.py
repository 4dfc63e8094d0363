"""Casts with one scale a tensor, and what every kernel that casts shares.

A kernel works on a row-major matrix, *direct*, and may write its transpose, *flipped*, from the same registers: both
operands of a GEMM on Hopper lie along K, so one tensor is read in two orders by its two GEMMs. Every tile is a load
and one store for each order, 16 bytes a thread at a time.

| call                        | launches | bytes read      | bytes written                        |
|-----------------------------|----------|-----------------|--------------------------------------|
| scale from this tensor      | 2        | 2 · size of x   | 1 an element, 2 with the transpose   |
| amax known from the past    | 2        | size of x       | the same; the first launch ends when it finds the amax |
| scale given                 | 1        | size of x       | the same                             |

The first launch leaves an amax and a count for each of at most 1024 programs; every program of the second finds the
largest itself, so nothing is cleared before. What is to be recorded is raised atomically by the kernel that casts. The
host reads none of it.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import Format
from octavo.kernels.triton import launching
from octavo.kernels.triton.codes import (
    INTERPRETED,
    code_from_number,
    encode_scale_from_amax,
    format_constants,
    has_hardware_casts,
    number_from_code,
    reciprocal,
)
from octavo.numerics import CastSpec, Nonfinite, Record

__all__ = [
    "TILE",
    "Lines",
    "any_broken",
    "as_held",
    "as_written",
    "cast_tensor",
    "ceil_div",
    "codes_of",
    "constants",
    "empty_codes",
    "finite",
    "first_of_tile",
    "highest",
    "is_broken",
    "raise_count",
    "report",
    "where_broken_goes",
]

TILE = (64, 128)  # rows and columns that a program turns: 32 elements a thread, stores of 64 bytes and more
_ELEMENTS = 8192  # of a flat tile: 32 a thread
_PROGRAMS = 1024  # that measure: some eight a multiprocessor, whose amaxes the casting programs read
_NO_LARGER_MARGIN = 4096  # binades: below what FP64 holds
_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)
_FP32_MAX: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).max)
_INFINITY: tl.constexpr = tl.constexpr(0x7F80_0000)  # bits of a magnitude; those of NaN are larger, all others smaller


@dataclass(frozen=True, slots=True)
class Lines:
    """Codes in one order with what belongs to them; scale and amax in the granularity's shape.

    With one scale for the tensor there is no amax but what is recorded.
    """

    codes: Tensor
    scale: Tensor
    amax: Tensor | None


def constants(spec: CastSpec, device: torch.device) -> dict[str, Any]:
    """Compile-time arguments of a kernel that measures and casts."""
    return format_constants(spec.format) | {
        "ROUNDING": str(spec.scale_rounding),
        "FLOOR": float(spec.amax_floor),
        "MARGIN": int(min(spec.margin, _NO_LARGER_MARGIN)),
        "PROPAGATE": spec.nonfinite == Nonfinite.PROPAGATE,
        "HARDWARE": has_hardware_casts(device),
    }


def empty_codes(rows: int, columns: int, fmt: Format, device: torch.device, *, wanted: bool) -> Tensor:
    """Memory for codes; a single one where they are not wanted."""
    return torch.empty((rows, columns) if wanted else (1, 1), dtype=fmt.torch_dtype, device=device)


def as_written(out: Tensor) -> Tensor:
    """Codes or values as kernels write them: codes in their own dtype where the device has it, as bytes elsewhere.

    Of bytes that are later viewed as codes inductor's templates for products would see the bytes.
    """
    return out if out.itemsize > 1 or has_hardware_casts(out.device) else out.view(torch.uint8)


@triton.jit
def codes_of(
    number,
    encode_scale,
    MAX: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    PROPAGATE: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """FP32 numbers, scaled and cast."""
    scaled = number * encode_scale
    if PROPAGATE and MANTISSA == 3 and HARDWARE:  # adding 0 · number changes nothing, but makes NaN of an infinite one
        return code_from_number(tl.fma(number, 0.0, scaled), MAX, MANTISSA, BIAS, False, HARDWARE)
    infinite = tl.abs(number) == float("inf")
    return code_from_number(scaled, MAX, MANTISSA, BIAS, PROPAGATE, HARDWARE, infinite)


@triton.jit
def as_held(made, memory):
    """Codes, uint8, in the dtype of the memory that holds them."""
    return made.to(memory.dtype.element_ty, bitcast=True)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def highest(number, AXIS: tl.constexpr):
    """The largest magnitude along an axis: NaN or infinite if any number is, which one instruction finds out."""
    if _INTERPRETED:  # it reduces by a function of ours in a loop of Python; integers have no NaN to lose
        return tl.max(tl.abs(number).to(tl.int32, bitcast=True), AXIS).to(tl.float32, bitcast=True)
    return tl.reduce(tl.abs(number), AXIS, _larger)


@triton.jit
def is_broken(number):
    """Where FP32 numbers are NaN or ±Inf."""
    return (number.to(tl.int32, bitcast=True) & 0x7FFF_FFFF) >= _INFINITY


@triton.jit
def any_broken(number):
    """Whether one of a block of FP32 numbers is NaN or ±Inf."""
    return tl.max(is_broken(tl.ravel(number)).to(tl.int32), 0) > 0


@triton.jit
def finite(number):
    """Numbers, 0 where they are NaN or ±Inf."""
    return tl.where(is_broken(number), 0.0, number)


@triton.jit
def ceil_div(size, block):
    """⌈size / block⌉ of a size of 1 or more. ``tl.cdiv`` adds first, beyond int32 where a size is just below 2^31."""
    return (size - 1) // block + 1


@triton.jit
def first_of_tile(tile, columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """The rows and columns of a tile, int64; tiles are counted along the columns first."""
    across = ceil_div(columns, BLOCK_COLUMNS)
    row = (tile // across).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = (tile % across).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    return row, column


@triton.jit
def raise_count(word, found):
    """Add the number of true elements to an int64 in memory."""
    tl.atomic_add(word, tl.sum(tl.ravel(found).to(tl.int32), 0).to(tl.int64), sem="relaxed")


@triton.jit
def report(overflowed, nonfinite, broken):
    """Record that elements, of which there are some, are NaN or ±Inf; a None records nothing."""
    if nonfinite is not None:
        raise_count(nonfinite, broken)
    if overflowed is not None:
        tl.store(overflowed, 1)


@triton.jit
def _raise_amax(recorded, amax):
    """Raise an FP32 number that is seen as int32: -1, which stands for none, is below them all; NaN does not occur."""
    bits = amax.to(tl.int32, bitcast=True)
    if bits > tl.load(recorded):  # what is read may be out of date, which costs an atomic operation and no more
        tl.atomic_max(recorded, bits, sem="relaxed")


@triton.jit
def measure_tensor_kernel(
    x, found, known,
    rows, columns, stride, tiles,
    PROGRAMS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Amax and number of non-finite elements of every program's share. Reads x once, or nothing if an amax is known."""
    if known is not None:
        tiles = tl.where(tl.load(known) > 0, 0, tiles)
    start, step = tl.program_id(0) * UNROLL, tl.num_programs(0) * UNROLL
    most = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for tile in range(start, tiles, step):
        for further in tl.static_range(UNROLL):  # loads that do not wait for each other
            number = _tile(x, tile + further, rows, columns, stride, BLOCK_ROWS, BLOCK_COLUMNS)
            most = _larger(most, tl.abs(number))
    amax = highest(tl.ravel(most), 0)
    count = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.int32)
    if is_broken(amax):
        most = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        for tile in range(start, tiles, step):
            for further in tl.static_range(UNROLL):
                number = _tile(x, tile + further, rows, columns, stride, BLOCK_ROWS, BLOCK_COLUMNS)
                most = tl.maximum(most, tl.abs(finite(number)))
                count += is_broken(number).to(tl.int32)
        amax = highest(tl.ravel(most), 0)
    tl.store(found + tl.program_id(0), amax.to(tl.int32, bitcast=True))
    tl.store(found + PROGRAMS + tl.program_id(0), tl.sum(tl.ravel(count), 0))


@triton.jit
def _tile(x, tile, rows, columns, stride, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    row, column = first_of_tile(tile, columns, BLOCK_ROWS, BLOCK_COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _record_programs(
    amax, found, measured_by, amax_record, overflowed, nonfinite, PROGRAMS: tl.constexpr, FRESH: tl.constexpr
):
    """Record what so many programs have measured before."""
    share = tl.arange(0, PROGRAMS)
    count = tl.sum(tl.load(found + PROGRAMS + share, mask=share < measured_by, other=0).to(tl.int64), 0)
    if FRESH:
        tl.store(amax_record, amax.to(tl.int32, bitcast=True))
        tl.store(nonfinite, count)
    else:
        if amax_record is not None:
            _raise_amax(amax_record, amax)
        if nonfinite is not None:
            tl.atomic_add(nonfinite, count, sem="relaxed")
    if overflowed is not None:
        tl.store(overflowed, 1, mask=count > 0)


@triton.jit
def cast_tensor_kernel(
    x, out, flipped, given, found, scale,
    amax_record, overflowed, nonfinite, saturation,
    rows, columns, stride, out_stride, measured_by,
    SOURCE: tl.constexpr, MEASURE: tl.constexpr, FRESH: tl.constexpr, PROGRAMS: tl.constexpr,
    DIRECT: tl.constexpr, FLIPPED: tl.constexpr, VALUES: tl.constexpr,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, ROUNDING: tl.constexpr, FLOOR: tl.constexpr,
    MARGIN: tl.constexpr, PROPAGATE: tl.constexpr, HARDWARE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Reads x once, writes a byte an element for each order; with VALUES, x's size once.

    SOURCE says where the scale comes from: the amax "measured" by so many programs, "known" or, where that is 0,
    measured, "amax" whatever it is, or "scale". MEASURE says whether anything is to be recorded, FRESH that "measured"
    is, in memory that holds nothing yet.
    """
    row, column = first_of_tile(tl.program_id(0), columns, BLOCK_ROWS, BLOCK_COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    number = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    one = tl.arange(0, 1)
    if SOURCE == "scale":
        decode = tl.load(given + one)
        encode = tl.minimum(reciprocal(decode), _FP32_MAX)
    else:
        if SOURCE == "measured":
            amax = one + _highest_of_programs(found, measured_by, PROGRAMS)
        else:
            amax = tl.load(given + one)
            if SOURCE == "known":
                if tl.max((amax > 0).to(tl.int32), 0) == 0:
                    amax = one + _highest_of_programs(found, measured_by, PROGRAMS)
        encode = encode_scale_from_amax(amax, MAX, MANTISSA, ROUNDING, FLOOR, MARGIN)
        decode = reciprocal(encode)
    if tl.program_id(0) == 0:
        tl.store(scale + one, decode)
    made = codes_of(number, encode[:, None], MAX, MANTISSA, BIAS, PROPAGATE, HARDWARE)
    if VALUES:
        value = number_from_code(made, MANTISSA, HARDWARE) * decode[:, None]
        tl.store(out + row[:, None] * out_stride + column[None, :], value.to(out.dtype.element_ty), mask=inside)
    elif DIRECT:
        tl.store(out + row[:, None] * out_stride + column[None, :], as_held(made, out), mask=inside)
    if FLIPPED:
        turned = (column < columns)[:, None] & (row < rows)[None, :]
        tl.store(flipped + column[:, None] * rows + row[None, :], as_held(tl.trans(made), flipped), mask=turned)
    if saturation is not None:
        whole = is_broken(number) == 0
        raise_count(saturation, whole & (tl.abs(number * encode[:, None]) > MAX))
        raise_count(saturation + 1, whole & (number != 0) & ((made & 0x7F) == 0))
    if MEASURE:
        if SOURCE == "measured":
            if tl.program_id(0) == 0:
                _record_programs(
                    tl.max(amax, 0), found, measured_by, amax_record, overflowed, nonfinite, PROGRAMS, FRESH
                )
        else:
            largest = highest(tl.ravel(number), 0)
            if is_broken(largest):
                report(overflowed, nonfinite, is_broken(number))
                largest = highest(tl.ravel(finite(number)), 0)
            if amax_record is not None:
                _raise_amax(amax_record, largest)


@triton.jit
def _highest_of_programs(found, programs, PROGRAMS: tl.constexpr):
    share = tl.arange(0, PROGRAMS)
    bits = tl.load(found + share, mask=share < programs, other=0)  # of numbers that are not negative: in their order
    return tl.max(bits, 0).to(tl.float32, bitcast=True)


def where_broken_goes(into: Record | None) -> tuple[Tensor | None, Tensor | None]:
    """What kernels take of a record of NaN and ±Inf: a byte to set and a count to raise."""
    if into is None:
        return None, None
    return None if into.overflowed is None else into.overflowed.view(torch.uint8), into.nonfinite


def cast_tensor(
    matrix: Tensor,
    spec: CastSpec,
    *,
    amax: Tensor | None = None,
    scale: Tensor | None = None,
    measure_if_zero: bool = False,
    direct: bool = True,
    flipped: bool = False,
    counting: bool = False,
    values: Tensor | None = None,
    into: Record | None = None,
    fresh: bool = False,
) -> tuple[Lines | None, Lines | None, Tensor | None]:
    """Cast with one scale for a matrix.

    Args:
        matrix: [M, K] float32, bfloat16 or float16, not empty, its columns side by side.
        spec: how to cast, with one scale for the tensor.
        amax: float32 [], to provide for instead of what is measured.
        scale: float32 [], used as it is.
        measure_if_zero: whether a given amax of 0 means the measured one.
        direct: whether to write the matrix.
        flipped: whether to write its transpose, [K, M].
        counting: whether to count saturated and underflowed elements.
        values: where to write what the codes stand for, instead of codes: shaped and laid out as ``matrix``, or itself.
        into: where to record what is measured.
        fresh: whether ``into`` holds nothing yet: amax and count are written, not raised; the scale must be measured.

    Returns:
        The matrix, its transpose, and int64 [2], the numbers of saturated and underflowed elements.
    """
    device, (rows, columns) = matrix.device, matrix.shape
    source = "scale" if scale is not None else "measured" if amax is None else "known" if measure_if_zero else "amax"
    given = scale if amax is None else amax
    given = None if given is None else given.detach().to(torch.float32)
    found, programs = _measure_tensor(matrix, given) if source in {"measured", "known"} else (None, 0)
    saturation = torch.zeros(2, dtype=torch.int64, device=device) if counting else None
    amax_record = None if into is None or into.amax is None else into.amax.view(torch.int32)
    overflowed, nonfinite = where_broken_goes(into)
    used = launching.allocate(matrix, (), torch.float32)
    out = empty_codes(rows, columns, spec.format, device, wanted=direct) if values is None else values
    turned = empty_codes(columns, rows, spec.format, device, wanted=flipped)
    shape, stride, out_stride = (rows, columns), matrix.stride(0), out.stride(0)
    if not flipped:
        shape, stride, out_stride = _flat(matrix, out)
    block_rows, block_columns = TILE if flipped else _flat_tile(*shape)
    tiles = launching.ceil_div(shape[0], block_rows) * launching.ceil_div(shape[1], block_columns)
    launching.launch(
        cast_tensor_kernel, (tiles,),
        matrix, as_written(out), as_written(turned), given, found, used,
        amax_record, overflowed, nonfinite, saturation,
        *shape, stride, out_stride, programs,
        SOURCE=source, MEASURE=into is not None and into.gathers, FRESH=fresh,
        PROGRAMS=_PROGRAMS, DIRECT=direct, FLIPPED=flipped, VALUES=values is not None,
        **constants(spec, device),
        BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, num_warps=8,
    )  # fmt: skip
    return Lines(out, used, None) if direct else None, Lines(turned, used, None) if flipped else None, saturation


def _measure_tensor(matrix: Tensor, known: Tensor | None) -> tuple[Tensor, int]:
    """Bits of amaxes and counts of non-finite elements, int32 [2, 1024], and how many programs' there are."""
    shape, stride, _ = _flat(matrix, matrix)
    block_rows, block_columns = _flat_tile(*shape, _ELEMENTS // 4)
    tiles = launching.ceil_div(shape[0], block_rows) * launching.ceil_div(shape[1], block_columns)
    programs = min(launching.ceil_div(tiles, 4), _PROGRAMS)
    found = torch.empty((2, _PROGRAMS), dtype=torch.int32, device=matrix.device)
    launching.launch(
        measure_tensor_kernel, (programs,),
        matrix, found, known, *shape, stride, tiles,
        PROGRAMS=_PROGRAMS, BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, UNROLL=4, num_warps=8,
    )  # fmt: skip
    return found, programs


def _flat(matrix: Tensor, out: Tensor) -> tuple[tuple[int, int], int, int]:
    """Rows and columns of a matrix and the strides of both: one row where there are no gaps between their rows."""
    if matrix.is_contiguous() and out.is_contiguous():
        size = matrix.numel()
        return (1, size), size, size
    rows, columns = matrix.shape
    return (rows, columns), matrix.stride(0), out.stride(0)


def _flat_tile(rows: int, columns: int, elements: int = _ELEMENTS) -> tuple[int, int]:
    """Rows and columns of a tile of so many elements, as long as the matrix is wide."""
    across = launching.tile_side(columns, elements)
    return launching.tile_side(rows, elements // across), across

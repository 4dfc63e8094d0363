"""Tensorwise casts, and the device functions that all kernels that cast share.

    codes = RNE(fp32(x) · encode),  encode = MAX / max |x|,  scale = 1 / encode

A kernel reads a row-major matrix [rows, columns], writes its codes in the same order (*direct*) and may write those of
the transpose (*transposed*) from the same registers: Hopper's FP8 GEMM reads both operands along K, so the two GEMMs of
a tensor read it in two orders. Every tile is a load and one store for each order, 16 bytes a thread at a time.

| call                        | launches | bytes read      | bytes written                        |
|-----------------------------|----------|-----------------|--------------------------------------|
| scale from this tensor      | 2        | 2 · size of x   | 1 an element, 2 with the transpose   |
| amax known from the past    | 2        | size of x       | the same; the first launch ends when it finds the amax |
| scale given                 | 1        | size of x       | the same                             |

The first launch stores an amax and a count for each of at most 1024 programs, and every program of the second launch
reduces those itself: a single word updated by all would have to be cleared by a launch before. The kernel that casts
updates the layer's :class:`octavo.numerics.AmaxRecord` atomically. The host reads none of it.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import launching
from octavo.kernels.triton.codes import (
    INTERPRETED,
    LEAST_PER_WARP,
    code_from_number,
    encode_scale_from_amax,
    format_constants,
    has_hardware_casts,
    number_from_code,
    reciprocal,
)
from octavo.numerics import AmaxRecord, CastSpec, Nonfinite
from octavo.numerics.cast_spec import LARGEST_MARGIN

__all__ = [
    "TILE",
    "OrientedCast",
    "add_count",
    "any_nonfinite",
    "as_kernel_output",
    "as_stored",
    "cast_tensor",
    "ceil_div",
    "codes_of",
    "constants",
    "first_of_tile",
    "is_nonfinite",
    "max_magnitude",
    "nonfinite_buffers",
    "record_nonfinite",
    "zero_nonfinite",
]

TILE = (64, 128)  # rows and columns that a program turns: 32 elements a thread, stores of 64 bytes and more
_ELEMENTS, _WARPS = 8192, 8  # of a flat tile: 32 elements a thread
_PROGRAMS = 1024  # that measure: some eight a multiprocessor, whose amaxes the casting programs read
_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)
_FP32_MAX: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).max)
_INFINITY: tl.constexpr = tl.constexpr(0x7F80_0000)  # bits of a magnitude; those of NaN are larger, all others smaller


@dataclass(frozen=True, slots=True)
class OrientedCast:
    """Codes of a matrix or of its transpose, with scales and amaxes in the granularity's shape.

    A cast with one scale returns no amax; it is recorded.
    """

    codes: Tensor
    scale: Tensor
    amax: Tensor | None


@cache  # every cast asks
def constants(spec: CastSpec, device: torch.device) -> dict[str, Any]:
    """Compile-time arguments of a kernel that measures and casts; not to be changed."""
    return format_constants(spec.format) | {
        "ROUNDING": str(spec.scale_rounding),
        "FLOOR": float(spec.amax_floor),
        "MARGIN": int(min(spec.margin, LARGEST_MARGIN)),
        "PROPAGATE": spec.nonfinite == Nonfinite.PROPAGATE,
        "HARDWARE": has_hardware_casts(device),
    }


def as_kernel_output(out: Tensor | None) -> Tensor | None:
    """Codes or values as a kernel's argument: codes in their own dtype where the device has it, as bytes elsewhere.

    If a kernel wrote bytes that are viewed as codes later, inductor's GEMM templates would see the bytes. None stands
    for an order that is not written.
    """
    return out if out is None or out.itemsize > 1 or has_hardware_casts(out.device) else out.view(torch.uint8)


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
    """Codes, uint8, of FP32 numbers times an encode scale."""
    scaled = number * encode_scale
    # E4M3 has no infinity to propagate: an infinite input becomes NaN. 0 · number is NaN for it and 0 for all finite
    # numbers, so one fma replaces a comparison and a select of codes.
    if PROPAGATE and MANTISSA == 3 and HARDWARE:
        return code_from_number(tl.fma(number, 0.0, scaled), MAX, MANTISSA, BIAS, False, HARDWARE)
    infinite = tl.abs(number) == float("inf")
    return code_from_number(scaled, MAX, MANTISSA, BIAS, PROPAGATE, HARDWARE, infinite)


@triton.jit
def as_stored(codes, memory):
    """Bitcast uint8 codes to the dtype of the memory that they are stored to, see as_kernel_output."""
    return codes.to(memory.dtype.element_ty, bitcast=True)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def max_magnitude(number, AXIS: tl.constexpr):
    """The largest magnitude along an axis; NaN or infinite if any number is.

    So one test of the maximum shows whether every number is finite, and the common case needs no mask of elements.
    On the device the reduction is max.NaN, one instruction a number.
    """
    # The interpreter would run a reduction by our own function as a Python loop. Magnitudes as integers are in the same
    # order, with NaN above infinity.
    if _INTERPRETED:
        return tl.max(tl.abs(number).to(tl.int32, bitcast=True), AXIS).to(tl.float32, bitcast=True)
    return tl.reduce(tl.abs(number), AXIS, _larger)


@triton.jit
def is_nonfinite(number):
    """Mask of the FP32 numbers that are NaN or ±Inf."""
    return (number.to(tl.int32, bitcast=True) & 0x7FFF_FFFF) >= _INFINITY


@triton.jit
def any_nonfinite(number):
    """Whether one of a block of FP32 numbers is NaN or ±Inf."""
    found = is_nonfinite(number).to(tl.int32)
    # One axis after the other: Triton up to 3.7 leaves out some lanes of what is reduced twice and then reshaped
    # (triton-lang/triton, pull request 9219).
    for _ in tl.static_range(len(number.shape)):
        found = tl.max(found, -1)
    return found > 0


@triton.jit
def zero_nonfinite(number):
    """FP32 numbers with 0 in place of NaN and ±Inf."""
    return tl.where(is_nonfinite(number), 0.0, number)


@triton.jit
def ceil_div(size, block):
    """⌈size / block⌉ of a size of 1 or more. ``tl.cdiv`` adds first, beyond int32 where a size is just below 2^31."""
    return (size - 1) // block + 1


@triton.jit
def first_of_tile(tile, columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Row and column indices of a tile, int64; tiles are numbered along the columns first.

    int64, because a row times a stride exceeds int32 in a tensor of 2^31 elements.
    """
    across = ceil_div(columns, BLOCK_COLUMNS)
    row = (tile // across).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = (tile % across).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    return row, column


@triton.jit
def add_count(counter, mask):
    """Add the number of true elements of a mask to an int64 in memory."""
    # "relaxed": only the sum counts, and it is read after the kernel has ended. So for every atomic operation here.
    tl.atomic_add(counter, tl.sum(tl.ravel(mask).to(tl.int32), 0).to(tl.int64), sem="relaxed")


@triton.jit
def record_nonfinite(overflowed, nonfinite, mask):
    """Record that the elements of a mask, at least one of them, are NaN or ±Inf; None records nothing."""
    if nonfinite is not None:
        add_count(nonfinite, mask)
    if overflowed is not None:
        tl.store(overflowed, 1)  # not atomic: all programs that write it write 1


@triton.jit
def _record_amax(recorded, amax):
    """Raise the recorded amax, an FP32 number in memory addressed as int32, to a finite amax.

    Bits of non-negative FP32 numbers are in the numbers' order. -1.0 stands for "none"; its sign bit makes it negative
    as an integer, so below all of them.
    """
    bits = amax.to(tl.int32, bitcast=True)
    # Most programs find a larger amax recorded already and need no atomic operation. A stale value costs one, no more.
    if bits > tl.load(recorded):
        tl.atomic_max(recorded, bits, sem="relaxed")


@triton.jit
def measure_tensor_kernel(
    x,  # [rows, columns] row-major, `stride` elements from row to row
    partials,  # int32 [2, PROGRAMS]: bits of each program's amax, its count of NaN and ±Inf
    known,  # float32, one element: the amax of past steps, or None
    rows, columns, stride, tiles,
    PROGRAMS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Amax and number of non-finite elements of every program's share of x.

        partials[0, p] = bits(max |x|) over program p's finite x,  partials[1, p] = number of its NaN and ±Inf

    A program takes UNROLL tiles after each other, then skips those of the others. Reads x once, or nothing if an amax
    is known.
    """
    if known is not None:
        tiles = tl.where(tl.load(known) > 0, 0, tiles)  # decided on the device: the host would have to wait for it
    start, step = tl.program_id(0) * UNROLL, tl.num_programs(0) * UNROLL
    # A maximum for each place of a tile: the reduction across threads comes once, after the loop.
    most = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for tile in range(start, tiles, step):
        for further in tl.static_range(UNROLL):  # loads that do not wait for each other; beyond the matrix they read 0
            number = _tile(x, tile + further, rows, columns, stride, BLOCK_ROWS, BLOCK_COLUMNS)
            most = _larger(most, tl.abs(number))
    amax = max_magnitude(tl.ravel(most), 0)
    count = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.int32)
    # A rare second reading, of this program's share alone, keeps the masks and counts out of the loop above.
    if is_nonfinite(amax):
        most = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        for tile in range(start, tiles, step):
            for further in tl.static_range(UNROLL):
                number = _tile(x, tile + further, rows, columns, stride, BLOCK_ROWS, BLOCK_COLUMNS)
                most = tl.maximum(most, tl.abs(zero_nonfinite(number)))
                count += is_nonfinite(number).to(tl.int32)
        amax = max_magnitude(tl.ravel(most), 0)
    tl.store(partials + tl.program_id(0), amax.to(tl.int32, bitcast=True))
    tl.store(partials + PROGRAMS + tl.program_id(0), tl.sum(tl.ravel(count), 0))


@triton.jit
def _tile(x, tile, rows, columns, stride, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """A tile in FP32, 0 beyond the matrix, which raises no maximum of magnitudes."""
    row, column = first_of_tile(tile, columns, BLOCK_ROWS, BLOCK_COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _record_all(
    amax, partials, measured_by, amax_record, overflowed, nonfinite, PROGRAMS: tl.constexpr, FRESH: tl.constexpr
):
    """Record what ``measured_by`` programs of measure_tensor_kernel measured: called by one program for the tensor."""
    share = tl.arange(0, PROGRAMS)
    count = tl.sum(tl.load(partials + PROGRAMS + share, mask=share < measured_by, other=0).to(tl.int64), 0)
    if FRESH:  # the record is uninitialized memory: stores instead of a launch that clears it
        tl.store(amax_record, amax.to(tl.int32, bitcast=True))
        tl.store(nonfinite, count)
    else:
        if amax_record is not None:
            _record_amax(amax_record, amax)
        if nonfinite is not None:
            tl.atomic_add(nonfinite, count, sem="relaxed")
    if overflowed is not None:
        tl.store(overflowed, 1, mask=count > 0)


@triton.jit
def cast_tensor_kernel(
    x,  # [rows, columns] row-major, `stride` elements from row to row
    out,  # codes, or values in x's dtype: [rows, columns] row-major, `out_stride` from row to row; may be x itself
    transposed,  # codes of the transpose: [columns, rows] row-major, without gaps; of both, None if not written
    given,  # float32, one element: amax or scale, by SOURCE
    partials,  # int32 [2, PROGRAMS] of measure_tensor_kernel, of which the first `measured_by` columns count
    scale,  # float32, one element, the decode scale: written
    amax_record, overflowed, nonfinite,  # float32 seen as int32, uint8, int64, one element each, or None: raised
    saturation,  # int64 [2] or None: increased by the numbers of saturated and underflowed elements
    rows, columns, stride, out_stride, measured_by,
    SOURCE: tl.constexpr, MEASURE: tl.constexpr, FRESH: tl.constexpr, PROGRAMS: tl.constexpr,
    DIRECT: tl.constexpr, TRANSPOSED: tl.constexpr, VALUES: tl.constexpr,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, ROUNDING: tl.constexpr, FLOOR: tl.constexpr,
    MARGIN: tl.constexpr, PROPAGATE: tl.constexpr, HARDWARE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One scale for x: codes = RNE(fp32(x) · encode); scale = 1 / encode. With VALUES, codes · scale instead of codes.

    A program owns a tile [BLOCK_ROWS, BLOCK_COLUMNS], for both orders. Reads x once, writes a byte an element for each
    order; with VALUES, x's size once.

    SOURCE is where the scale comes from: "measured", the amax that ``measured_by`` programs found; "known", a given
    amax or, where that is 0, the measured one; "amax", the given one even if 0; "scale", a given decode scale. MEASURE:
    whether to record; FRESH: the record is uninitialized, which only "measured" can fill.
    """
    # Loads beyond the matrix give 0: no amax grows by it, and no count takes it for an underflow.
    row, column = first_of_tile(tl.program_id(0), columns, BLOCK_ROWS, BLOCK_COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    number = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    one = tl.arange(0, 1)  # scale and amax are blocks [1]: the shared device functions take blocks
    if SOURCE == "scale":
        decode = tl.load(given + one)
        encode = tl.minimum(reciprocal(decode), _FP32_MAX)  # of a subnormal scale the reciprocal may be infinite
    else:
        if SOURCE == "measured":
            amax = one + _max_of_programs(partials, measured_by, PROGRAMS)  # zero plus it, as a block [1]
        else:
            amax = tl.load(given + one)
            if SOURCE == "known":
                if tl.max((amax > 0).to(tl.int32), 0) == 0:
                    amax = one + _max_of_programs(partials, measured_by, PROGRAMS)
        encode = encode_scale_from_amax(amax, MAX, MANTISSA, ROUNDING, FLOOR, MARGIN)
        decode = reciprocal(encode)
    if tl.program_id(0) == 0:
        tl.store(scale + one, decode)
    codes = codes_of(number, encode[:, None], MAX, MANTISSA, BIAS, PROPAGATE, HARDWARE)
    if VALUES:
        value = number_from_code(codes, MANTISSA, HARDWARE) * decode[:, None]
        tl.store(out + row[:, None] * out_stride + column[None, :], value.to(out.dtype.element_ty), mask=inside)
    elif DIRECT:
        tl.store(out + row[:, None] * out_stride + column[None, :], as_stored(codes, out), mask=inside)
    if TRANSPOSED:  # codes are transposed, not numbers: a quarter of the bytes to exchange between threads
        inside_t = (column < columns)[:, None] & (row < rows)[None, :]
        codes_t = as_stored(tl.trans(codes), transposed)
        tl.store(transposed + column[:, None] * rows + row[None, :], codes_t, mask=inside_t)
    if saturation is not None:
        finite = is_nonfinite(number) == 0
        add_count(saturation, finite & (tl.abs(number * encode[:, None]) > MAX))
        add_count(saturation + 1, finite & (number != 0) & ((codes & 0x7F) == 0))  # ±0
    if MEASURE:
        if SOURCE == "measured":
            if tl.program_id(0) == 0:  # the whole tensor is measured: one program records it
                _record_all(tl.max(amax, 0), partials, measured_by, amax_record, overflowed, nonfinite, PROGRAMS, FRESH)
        else:  # the scale did not need this tensor's amax: each program records its tile's
            largest = max_magnitude(tl.ravel(number), 0)
            if is_nonfinite(largest):
                record_nonfinite(overflowed, nonfinite, is_nonfinite(number))
                largest = max_magnitude(tl.ravel(zero_nonfinite(number)), 0)
            if amax_record is not None:
                _record_amax(amax_record, largest)


@triton.jit
def _max_of_programs(partials, programs, PROGRAMS: tl.constexpr):
    """The amax of a tensor, from the bits that each of ``programs`` programs stored."""
    share = tl.arange(0, PROGRAMS)
    bits = tl.load(partials + share, mask=share < programs, other=0)  # of numbers that are not negative: in their order
    return tl.max(bits, 0).to(tl.float32, bitcast=True)


def nonfinite_buffers(record: AmaxRecord | None) -> tuple[Tensor | None, Tensor | None]:
    """Buffers for NaN and ±Inf as kernels take them: a byte to set and a count to add to, or None for either."""
    if record is None:
        return None, None
    return None if record.overflowed is None else record.overflowed.view(torch.uint8), record.nonfinite


def cast_tensor(
    matrix: Tensor,
    spec: CastSpec,
    *,
    amax: Tensor | None = None,
    scale: Tensor | None = None,
    measure_if_zero: bool = False,
    direct: bool = True,
    transposed: bool = False,
    counting: bool = False,
    values: Tensor | None = None,
    record: AmaxRecord | None = None,
    fresh: bool = False,
) -> tuple[OrientedCast | None, OrientedCast | None, Tensor | None]:
    """Cast with one scale for a matrix.

    Args:
        matrix: [M, K] float32, bfloat16 or float16, not empty, its columns side by side.
        spec: how to cast, with one scale for the tensor.
        amax: float32 [], to provide for instead of what is measured.
        scale: float32 [], used as it is.
        measure_if_zero: whether a given amax of 0 means the measured one.
        direct: whether to write the matrix.
        transposed: whether to write its transpose, [K, M].
        counting: whether to count saturated and underflowed elements.
        values: where to write what the codes stand for, instead of codes: shaped and laid out as ``matrix``, or itself.
        record: where to record what is measured.
        fresh: whether ``record`` holds nothing yet: amax and count are written, not raised; the scale must be measured.

    Returns:
        The matrix, its transpose, and int64 [2], the numbers of saturated and underflowed elements.
    """
    device, (rows, columns) = matrix.device, matrix.shape
    source = "scale" if scale is not None else "measured" if amax is None else "known" if measure_if_zero else "amax"
    given = scale if amax is None else amax
    given = None if given is None else given.detach().to(torch.float32)
    partials, programs = _measure_tensor(matrix, given) if source in {"measured", "known"} else (None, 0)
    saturation = torch.zeros(2, dtype=torch.int64, device=device) if counting else None
    amax_record = None if record is None or record.amax is None else record.amax.view(torch.int32)
    overflowed, nonfinite = nonfinite_buffers(record)
    used = launching.allocate(matrix, (), torch.float32)
    codes = spec.format.torch_dtype
    out = torch.empty(rows, columns, dtype=codes, device=device) if direct and values is None else values
    transposed_codes = torch.empty(columns, rows, dtype=codes, device=device) if transposed else None
    shape, stride, out_stride = (rows, columns), matrix.stride(0), columns
    if out is not None and not transposed:
        shape, stride, out_stride = _flat(matrix, out)
    block_rows, block_columns = TILE if transposed else _flat_tile(*shape)
    tiles = launching.ceil_div(shape[0], block_rows) * launching.ceil_div(shape[1], block_columns)
    launching.launch(
        cast_tensor_kernel, (tiles,),
        matrix, as_kernel_output(out), as_kernel_output(transposed_codes), given, partials, used,
        amax_record, overflowed, nonfinite, saturation,
        *shape, stride, out_stride, programs,
        SOURCE=source, MEASURE=record is not None and record.gathers, FRESH=fresh,
        PROGRAMS=_PROGRAMS, DIRECT=direct, TRANSPOSED=transposed, VALUES=values is not None,
        **constants(spec, device),
        BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, num_warps=_WARPS,
    )  # fmt: skip
    return (
        None if out is None else OrientedCast(out, used, None),
        None if transposed_codes is None else OrientedCast(transposed_codes, used, None),
        saturation,
    )


def _measure_tensor(matrix: Tensor, known: Tensor | None) -> tuple[Tensor, int]:
    """Bits of amaxes and counts of non-finite elements, int32 [2, 1024], and how many programs wrote them."""
    shape, stride, _ = _flat(matrix, matrix)
    block_rows, block_columns = _flat_tile(*shape, _ELEMENTS // 4)  # four such tiles are in flight: UNROLL
    tiles = launching.ceil_div(shape[0], block_rows) * launching.ceil_div(shape[1], block_columns)
    programs = min(launching.ceil_div(tiles, 4), _PROGRAMS)
    partials = torch.empty((2, _PROGRAMS), dtype=torch.int32, device=matrix.device)
    launching.launch(
        measure_tensor_kernel, (programs,),
        matrix, partials, known, *shape, stride, tiles,
        PROGRAMS=_PROGRAMS, BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, UNROLL=4, num_warps=_WARPS,
    )  # fmt: skip
    return partials, programs


def _flat(matrix: Tensor, out: Tensor) -> tuple[tuple[int, int], int, int]:
    """Shape to cast a matrix in, and the row strides of matrix and result: one long row where neither has gaps.

    A narrow matrix would otherwise leave most of a tile's columns empty.
    """
    if matrix.is_contiguous() and out.is_contiguous():
        size = matrix.numel()
        return (1, size), size, size
    rows, columns = matrix.shape
    return (rows, columns), matrix.stride(0), out.stride(0)


def _flat_tile(rows: int, columns: int, elements: int = _ELEMENTS) -> tuple[int, int]:
    """Rows and columns of a tile of ``elements`` elements, as wide as the matrix allows."""
    across = launching.tile_side(columns, elements)
    return launching.tile_side(rows, elements // across, least=_WARPS * LEAST_PER_WARP // across), across

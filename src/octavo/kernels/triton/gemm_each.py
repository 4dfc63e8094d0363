"""Several GEMMs in one launch, of whatever sizes: those of the experts of a layer.

    y[i] = Σ_blocks (a[i][:, block] @ b[i][:, block].T) · scales + bias[i]

Rows of tokens sorted by expert differ in M (output, grad_input), and in K where the sum goes over an expert's tokens
(grad_weight); each has a result of its own. So a table in device memory has the sizes, strides and addresses of every
problem, and a program makes the descriptors of its tiles' operands there. Tiles of all problems are numbered one after
the other. A program owns every num_programs-th, whichever problem's it is, and makes descriptors once a problem.

The tile itself, operands' layouts and the order of sums are those of gemm.py, so results are those of single launches,
bit for bit. TMA has the same conditions as there: codes that do not meet them are copied first, all of an operand in
one launch. Such are the codes of transposed views, and those whose K is an expert's number of tokens.
"""

from collections.abc import Sequence
from contextvars import copy_context
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.errors import BackendError
from octavo.kernels.triton import gemm, launching
from octavo.kernels.triton.casts import first_of_tile
from octavo.kernels.triton.problem_table import find_problem, problem_table
from octavo.numerics import QuantizedTensor

__all__ = ["TILES", "product_each"]

compute_tile, place_of = gemm.compute_tile, gemm.place_of  # a kernel finds device functions among its module's globals

# Those of two halves leave no registers for a problem's entry, which gemm.py's kernel has in its parameters.
TILES = tuple(tile for tile in gemm.TILES if tile.halves == 1)
_COPIED = 64  # rows and columns that a program copies


@triton.jit
def scaled_gemm_each(
    # Of an entry: tiles, M, N, K, address of y and of the bias; for a, then b, see _Operand.places
    table,  # int64, see problem_table.py
    a, b, a_scale, b_scale, bias, out,  # tensors of the first problem: of their dtypes all are; bias is read with BIAS
    problems, tiles,  # numbers of them; tiles of all problems
    A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, ALONG_K: tl.constexpr, BIAS: tl.constexpr,
    SIDE_BY_SIDE: tl.constexpr, ALIGNED: tl.constexpr, PROBLEMS: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, HALVES: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute all tiles of all y: gemm.scaled_gemm for each problem.

    SIDE_BY_SIDE: b's scales of neighbouring columns of y are neighbours, and begin at multiples of 16 elements.
    ALIGNED: rows of y begin at multiples of 16 bytes. Both let a thread load and store several.
    """
    tile = tl.program_id(0)
    while tile < tiles:
        entry, first, last = find_problem(table, problems, tile, PROBLEMS)
        m = tl.load(entry + 1).to(tl.int32)
        n = tl.load(entry + 2).to(tl.int32)
        k = tl.load(entry + 3).to(tl.int32)
        y = tl.load(entry + 4).to(out.dtype)
        added = out
        if BIAS:
            added = tl.load(entry + 5).to(bias.dtype)
        left = tl.make_tensor_descriptor(tl.load(entry + 6).to(a.dtype), [m, k], [tl.load(entry + 7), 1], [ROWS, BLOCK])
        a_scales = tl.load(entry + 8).to(a_scale.dtype)
        a_scale_row = tl.load(entry + 9)
        a_scale_block = tl.load(entry + 10)
        right = tl.make_tensor_descriptor(
            tl.load(entry + 11).to(b.dtype), [n, k], [tl.load(entry + 12), 1], [COLUMNS, BLOCK]
        )
        b_scales = tl.load(entry + 13).to(b_scale.dtype)
        b_scale_row = tl.load(entry + 14)
        b_scale_block = tl.load(entry + 15)
        if SIDE_BY_SIDE:
            b_scales = tl.multiple_of(b_scales, 16)
            b_scale_row = 1
            b_scale_block = tl.multiple_of(b_scale_block, 16)
        if ALIGNED:
            y = tl.multiple_of(y, 16)
            n = tl.multiple_of(n, 16)
        down = tl.cdiv(m, ROWS * HALVES)
        across = tl.cdiv(n, COLUMNS)
        while tile < last:
            row, column = place_of(tile - first, down, across, ROWS * HALVES, COLUMNS, GROUP)
            compute_tile(
                left, right, a_scales, b_scales, added, y, row, column, column, m, n, k,
                a_scale_row, a_scale_block, b_scale_row, b_scale_block,
                A_ROWS, B_ROWS, ALONG_K, BIAS, ROWS, HALVES, COLUMNS, BLOCK,
            )  # fmt: skip
            tile += tl.num_programs(0)


@triton.jit
def copy_each_kernel(
    copies,  # one matrix after another: [rows, width] row-major, without gaps
    table,  # entries: tiles, rows, columns, width, address, both strides, first element of the copy
    problems,
    BY_COLUMNS: tl.constexpr, PROBLEMS: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Copy matrices [rows, columns] of any strides, zeros after the columns.

    A program owns a tile [SIDE, SIDE] of one copy. BY_COLUMNS: rows are neighbours, so that a tile is read turned.
    """
    entry, first, _ = find_problem(table, problems, tl.program_id(0), PROBLEMS)
    rows, columns = tl.load(entry + 1), tl.load(entry + 2)
    width, start = tl.multiple_of(tl.load(entry + 3), 16), tl.multiple_of(tl.load(entry + 7), 16)
    row, column = first_of_tile(tl.program_id(0) - first, width, SIDE, SIDE)
    source = tl.load(entry + 4).to(copies.dtype)
    if BY_COLUMNS:
        inside = (column < columns)[:, None] & (row < rows)[None, :]
        value = tl.trans(tl.load(source + column[:, None] * tl.load(entry + 6) + row[None, :], mask=inside, other=0))
    else:
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        at = row[:, None] * tl.load(entry + 5) + column[None, :] * tl.load(entry + 6)
        value = tl.load(source + at, mask=inside, other=0)
    at = start + row[:, None] * width + column[None, :]
    tl.store(copies + at, value, mask=(row < rows)[:, None] & (column < width)[None, :])


def product_each(
    a: Sequence[QuantizedTensor],
    b: Sequence[QuantizedTensor],
    outs: Sequence[Tensor],
    biases: Sequence[Tensor] | None = None,
) -> None:
    """Write ``a[i] @ b[i].T + biases[i]`` into ``outs[i]``; :func:`octavo.kernels.triton.gemm.product` for each.

    Args:
        a: [M, K] each, of one dtype and granularity.
        b: [N, K] each, of one dtype and granularity.
        outs: [M, N] each, contiguous, of one dtype.
        biases: [N] each, of one dtype, or None.

    Raises:
        BackendError: shapes that do not belong together, an output that is not contiguous, or different dtypes.
    """
    _check(a, b, outs)
    device = outs[0].device
    block, along_k = gemm.block_width((a[0].granularity, b[0].granularity), max(q.shape[1] for q in a))
    tile, programs = gemm.cheapest_tile(lambda tile: sum(_tiles(tile, outs)), device, TILES)
    added = None if biases is None else [bias.contiguous() for bias in biases]
    with launching.on_device_of(outs[0]):
        left, right = _operand(a), _operand(b, columns=tile.columns if along_k else 0)
        ends = list(accumulate(_tiles(tile, outs)))
        bias_places = [0] * len(a) if added is None else [bias.data_ptr() for bias in added]
        entries = [
            (end, *y.shape, q.shape[1], y.data_ptr(), bias, *of_a, *of_b)
            for end, y, q, bias, of_a, of_b in zip(ends, outs, a, bias_places, left.places, right.places, strict=True)
        ]
        copy_context().run(
            _launch_with_memory, programs, problem_table(entries, device),
            a[0].data, b[0].data, a[0].scale, b[0].scale, outs[0] if added is None else added[0], outs[0],
            len(a), ends[-1],
            A_ROWS=left.scale_rows or tile.rows,
            B_ROWS=right.scale_rows or tile.columns,
            ALONG_K=along_k,
            BIAS=added is not None,
            SIDE_BY_SIDE=right.side_by_side,
            ALIGNED=all(y.shape[1] % gemm.ALIGNMENT == y.data_ptr() % gemm.ALIGNMENT == 0 for y in outs),
            PROBLEMS=launching.next_power_of_2(len(a)),
            GROUP=gemm.GROUP,
            **gemm.tile_constants(tile, block),
        )  # fmt: skip


def _check(a: Sequence[QuantizedTensor], b: Sequence[QuantizedTensor], outs: Sequence[Tensor]) -> None:
    kinds = set()
    for left, right, out in zip(a, b, outs, strict=True):
        shape = (left.shape[0], right.shape[0])
        if left.shape[1] != right.shape[1] or out.shape != shape or not out.is_contiguous():
            raise BackendError(
                f"{tuple(left.shape)} times {tuple(right.shape)} transposed fills a contiguous {shape}, "
                f"not {tuple(out.shape)} with strides {out.stride()}"
            )
        kinds.add((*_kind(left), *_kind(right), out.dtype))
    if len(kinds) > 1:
        raise BackendError("products of one launch have operands and results of one dtype and granularity each")


def _kind(q: QuantizedTensor) -> tuple[object, ...]:
    return q.data.dtype, q.scale.dtype, q.granularity


def _tiles(tile: gemm.Tile, outs: Sequence[Tensor]) -> list[int]:
    """Number of tiles of each result."""
    return [launching.ceil_div(m, tile.rows) * launching.ceil_div(n, tile.columns) for m, n in (y.shape for y in outs)]


class _Operand(NamedTuple):
    """An operand of all problems.

    Attributes:
        places: of each problem: address and row stride of its codes, address, row and block stride of its scales.
        scale_rows: how many rows share a scale; 0 if all of each do.
        side_by_side: whether scales are copied as the kernel's SIDE_BY_SIDE says.
        copies: memory of copies, to be kept until the launch.
    """

    places: Sequence[tuple[int, ...]]
    scale_rows: int
    side_by_side: bool
    copies: tuple[Tensor | None, ...]


def _operand(each: Sequence[QuantizedTensor], *, columns: int = 0) -> _Operand:
    """Codes that TMA can read, and scales: with ``columns``, in whole tiles of so many columns of y, without a mask."""
    codes, copies = _k_major([q.data for q in each])
    scales = [gemm.Scales.of(q) for q in each]
    rows = max(scale.rows for scale in scales)
    places = [(scale.values.data_ptr(), scale.stride_row, scale.stride_block) for scale in scales]
    side_by_side = bool(columns) and rows % columns != 0
    scale_copies = None
    if side_by_side:
        groups = [launching.ceil_div(q.shape[0] + -q.shape[0] % columns, rows) for q in each]
        scale_copies, blocks = _copied([scale.values.t() for scale in scales], groups)
        places = [
            (at, 1, stride if scale.stride_block else 0) for (at, stride), scale in zip(blocks, scales, strict=True)
        ]
    both = [(*at, *scale) for at, scale in zip(codes, places, strict=True)]
    return _Operand(both, rows, side_by_side, (copies, scale_copies))


def _k_major(codes: Sequence[Tensor]) -> tuple[list[tuple[int, int]], Tensor | None]:
    """Address and row stride of each matrix of codes, or of the copy of one that TMA cannot read; the copies."""
    places = [(matrix.data_ptr(), matrix.stride(0)) for matrix in codes]
    others = [number for number, matrix in enumerate(codes) if not gemm.is_k_major(matrix)]
    if not others:
        return places, None
    copied = [codes[number].view(torch.uint8) for number in others]
    memory, copies = _copied(copied, [matrix.shape[1] for matrix in copied])
    for number, place in zip(others, copies, strict=True):
        places[number] = place
    return places, memory


def _copied(matrices: Sequence[Tensor], widths: Sequence[int]) -> tuple[Tensor, list[tuple[int, int]]]:
    """Copies of matrices, by one launch, zeros after their columns up to ``widths`` and the next multiple of 16.

    Returns:
        The memory of all; the address and row stride of each, both multiples of 16 elements.
    """
    widths = [width + -width % gemm.ALIGNMENT for width in widths]
    *starts, total = accumulate((len(x) * width for x, width in zip(matrices, widths, strict=True)), initial=0)
    tiles = [
        launching.ceil_div(len(x), _COPIED) * launching.ceil_div(width, _COPIED)
        for x, width in zip(matrices, widths, strict=True)
    ]
    rows = zip(accumulate(tiles), matrices, widths, starts, strict=True)
    entries = [(end, *x.shape, width, x.data_ptr(), *x.stride(), start) for end, x, width, start in rows]
    memory = matrices[0].new_empty(total)
    launching.launch(
        copy_each_kernel, (sum(tiles),), memory, problem_table(entries, memory.device), len(matrices),
        BY_COLUMNS=all(x.stride(0) == 1 for x in matrices),
        PROBLEMS=launching.next_power_of_2(len(matrices)),
        SIDE=_COPIED,
        num_warps=4,
    )  # fmt: skip
    first = memory.data_ptr()
    return memory, [(first + start * memory.itemsize, width) for start, width in zip(starts, widths, strict=True)]


def _launch_with_memory(programs: int, *arguments: object, **constants: Any) -> None:
    """Launch the GEMM, in a context of its own, where Triton finds memory to write descriptors to."""
    triton.set_allocator(_memory)
    launching.launch(scaled_gemm_each, (programs,), *arguments, **constants)


def _memory(size: int, alignment: int, stream: int | None) -> Tensor:  # noqa: ARG001 (Triton's signature)
    return torch.empty(size, dtype=torch.int8, device="cuda")

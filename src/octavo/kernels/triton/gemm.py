"""GEMMs of codes on FP8 tensor cores, with scales that may change along K.

    y = Σ_blocks (a[:, block] @ b[:, block].T) · a_scale[:, block] · b_scale[:, block].T + bias

| tensor       | shape                                               | layout                                  |
|--------------|-----------------------------------------------------|-----------------------------------------|
| a, b         | [M, K], [N, K]                                      | row-major, a row begins at 16 bytes · i |
| their scales | [⌈M / rows⌉, ⌈K / block⌉], [⌈N / rows⌉, ⌈K / block⌉] | any strides, see :class:`Scales`        |
| y            | [M, N]                                              | row-major, contiguous                   |

A program computes a tile of y. The tensor core sums one block of K, from zero; the block's sums times both scales are
added to the tile's FP32 accumulator. Inside a block Hopper's tensor cores keep 13 fraction bits (octavo.numerics'
accumulate.py describes it), so with blocks of 128 these are the sums called ``hopper-slow``. Where no scale changes
along K, blocks of 128 are added as they are, and the scales multiply the finished sums.

A block's two scales are multiplied first. Their product is one FP32 number: below 2^-126 it loses bits, and outputs
that small do with it; beyond FP32 it is infinite, as all but the smallest outputs are.

Tiles of codes are fetched by the tensor memory accelerator (TMA), which requires every row to begin at a multiple of 16
bytes and fills with zeros what lies outside of the matrix. Codes whose rows do not are copied first, as are transposed
views: an operand's K must be the contiguous dimension. Scales of b that change from column to column of y are copied
too, unless they lie side by side: a thread needs 32 of them for every block, and loads two at once then.

Programs are persistent: each takes one tile after another, in an order that keeps a few rows of tiles together, so that
programs find each other's codes in the L2 cache. Registers limit the tile: two accumulators, the tile's and the
block's, of 256 x 128 numbers would take all that a thread of eight warps may have. So a tile may consist of two halves,
which share the codes of b: the block's sums of one half are added before those of the other begin.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.triton import launching
from octavo.kernels.triton.codes import INTERPRETED, number_from_scale, round_to
from octavo.numerics import Granularity, PerBlock, PerTensor, QuantizedTensor
from octavo.numerics.accumulate import CHAIN

__all__ = [
    "ALIGNMENT",
    "GROUP",
    "TILES",
    "Scales",
    "Tile",
    "block_width",
    "cheapest_tile",
    "choose_tile",
    "compute_tile",
    "is_k_major",
    "k_major",
    "place_of",
    "product",
    "programs",
    "tile_constants",
]


@dataclass(frozen=True, slots=True)
class Tile:
    """The launch of a program: ``halves`` x ``rows`` rows and ``columns`` columns of y at once, warps and stages.

    ``stages`` is how many blocks of K are in flight through shared memory. ``cost`` is the time that a block of K
    takes, in units of the first tile's.
    """

    rows: int
    halves: int
    columns: int
    warps: int
    stages: int
    cost: float


# The cheapest for a shape is taken. Costs are counted, not measured: bytes from the L2 cache for each product.
TILES: tuple[Tile, ...] = (
    Tile(rows=128, halves=2, columns=128, warps=8, stages=4, cost=1.0),
    Tile(rows=128, halves=1, columns=128, warps=8, stages=4, cost=0.65),
    Tile(rows=64, halves=1, columns=128, warps=4, stages=4, cost=0.45),
)
GROUP = 8  # rows of tiles that are worked on together
ALIGNMENT = 16  # bytes
_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)


@triton.jit
def add_scaled(total, sums, scale, other_scale):
    """``total + sums · (scale · other_scale)``; total and sums [ROWS, COLUMNS], scales [ROWS, 1] and [1, COLUMNS].

    An opaque instruction, since the compiler would put these off until after the next block's dot, whose sums then need
    registers beside these.
    """
    scale = tl.broadcast_to(scale, total.shape)
    if _INTERPRETED:  # which knows no PTX
        total += sums * (scale * other_scale)
    else:
        instructions: tl.constexpr = "{ .reg .f32 both; mul.rn.f32 both, $2, $3; fma.rn.f32 $0, $1, both, $4; }"
        other_scale = tl.broadcast_to(other_scale, total.shape)
        total = tl.inline_asm_elementwise(
            instructions, "=f,f,f,f,f", [sums, scale, other_scale, total], tl.float32, is_pure=False, pack=1
        )
    return total


@triton.jit
def add_scaled_rows(total, sums, scale):
    """``total + sums · scale``; total and sums [ROWS, COLUMNS], scale [ROWS, 1]. An opaque instruction as above."""
    scale = tl.broadcast_to(scale, total.shape)
    if _INTERPRETED:
        total += sums * scale
    else:
        instruction: tl.constexpr = "fma.rn.f32 $0, $1, $2, $3;"
        total = tl.inline_asm_elementwise(instruction, "=f,f,f,f", [sums, scale, total], tl.float32, False, 1)
    return total


@triton.jit
def tile_sums(
    a, b,  # descriptors of codes: [M, K] in boxes [ROWS, BLOCK], [N, K] in boxes [COLUMNS, BLOCK], row-major
    a_scale, b_scale,  # float32, or uint8 (E8M0), with the strides below
    row, column, b_row, m, k,  # of the tile in y; b_row, its first row of b, is `column` unless b is a stack
    a_scale_row, a_scale_block, b_scale_row, b_scale_block,  # elements from group to group of rows, block to block of K
    A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, ALONG_K: tl.constexpr,
    ROWS: tl.constexpr, HALVES: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile's sums in FP32, [ROWS, COLUMNS] for each of two halves of its rows.

    With HALVES of 1 the second means nothing.

        sums = Σ_blocks (a[rows, block] @ b[columns, block].T) · a_scale[rows, block] · b_scale[columns, block].T

    Without ALONG_K the scales are left out: store_columns applies them. A_ROWS and B_ROWS are how many rows of a and b
    share a scale.
    """
    # Rows of y below the matrix: their codes are zeros, and their scales must not be read, which no descriptor guards.
    upper_rows = row + tl.arange(0, ROWS)
    lower_rows = upper_rows + ROWS
    upper_within, lower_within = upper_rows < m, lower_rows < m
    upper_at = (upper_rows // A_ROWS).to(tl.int64) * a_scale_row
    lower_at = (lower_rows // A_ROWS).to(tl.int64) * a_scale_row
    ONE_COLUMN: tl.constexpr = B_ROWS % COLUMNS == 0  # one scale for all columns: a number, not a row
    if ONE_COLUMN:
        b_at = (column // B_ROWS).to(tl.int64) * b_scale_row
    else:  # no mask: Scales.columnwise pads them to whole tiles
        b_at = ((column + tl.arange(0, COLUMNS)) // B_ROWS).to(tl.int64) * b_scale_row
    upper = tl.zeros((ROWS, COLUMNS), tl.float32)
    lower = tl.zeros((ROWS, COLUMNS), tl.float32)
    ones = tl.full((ROWS, 1), 1.0, tl.float32)
    # Each dot starts from zero, since a tensor core's own running total keeps only 13 fraction bits. K's ragged end
    # needs no mask: the descriptor reads zeros there.
    for block in range(tl.cdiv(k, BLOCK)):
        right = b.load([b_row, block * BLOCK]).T  # a view of shared memory: wgmma reads FP8 operands along K alone
        left = a.load([row, block * BLOCK])
        if ALONG_K:
            b_scales = number_from_scale(tl.load(b_scale + b_at + block * b_scale_block))
            stored = tl.load(a_scale + upper_at + block * a_scale_block, mask=upper_within, other=0)
            scales = number_from_scale(stored)[:, None]
            if ONE_COLUMN:
                upper = add_scaled_rows(upper, tl.dot(left, right), scales * b_scales)
            else:
                upper = add_scaled(upper, tl.dot(left, right), scales, b_scales[None, :])
        else:  # times one: the same opaque instruction keeps the additions before the next dot
            upper = add_scaled_rows(upper, tl.dot(left, right), ones)
        if HALVES == 2:  # after the upper half's sums are added, so that one block's sums occupy registers at a time
            left = a.load([row + ROWS, block * BLOCK])
            if ALONG_K:
                stored = tl.load(a_scale + lower_at + block * a_scale_block, mask=lower_within, other=0)
                scales = number_from_scale(stored)[:, None]
                if ONE_COLUMN:
                    lower = add_scaled_rows(lower, tl.dot(left, right), scales * b_scales)
                else:
                    lower = add_scaled(lower, tl.dot(left, right), scales, b_scales[None, :])
            else:
                lower = add_scaled_rows(lower, tl.dot(left, right), ones)
    return upper, lower


@triton.jit
def store_columns(
    out,  # [M, N] row-major, contiguous
    sums,  # [ROWS, COLUMNS] FP32 in registers
    a_scale, b_scale, bias,  # see tile_sums; [N], read with BIAS
    row, column, m, n, a_scale_row, b_scale_row,
    A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, ALONG_K: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Apply the scales that are the same for all of K, add the bias, round once, and write what lies inside of y.

    y = round(sums · (a_scale · b_scale.T) + bias)
    """
    rows = row + tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    if not ALONG_K:
        a_stored = tl.load(a_scale + (rows // A_ROWS).to(tl.int64) * a_scale_row, mask=rows < m, other=0)
        b_stored = tl.load(b_scale + (columns // B_ROWS).to(tl.int64) * b_scale_row, mask=columns < n, other=0)
        sums *= number_from_scale(a_stored)[:, None] * number_from_scale(b_stored)[None, :]
    if BIAS:
        sums += tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    # int64, as a row times n may exceed int32. Masked stores, not TMA's, since rows of y may have any length.
    at = rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(out + at, round_to(sums, out.dtype.element_ty), mask=(rows < m)[:, None] & (columns < n)[None, :])


@triton.jit
def store_sums(
    out, sums, a_scale, b_scale, bias, row, column, m, n, a_scale_row, b_scale_row,
    A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, ALONG_K: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Store a tile in PARTS groups of columns, see :func:`store_columns`.

    All columns at once would take too many registers on their way to memory.
    """
    if PARTS == 1:
        store_columns(
            out, sums, a_scale, b_scale, bias, row, column, m, n, a_scale_row, b_scale_row,
            A_ROWS, B_ROWS, ALONG_K, BIAS, ROWS, COLUMNS,
        )  # fmt: skip
    else:
        HALF: tl.constexpr = COLUMNS // 2
        # tl.split takes the last dimension apart, which must be 2: [ROWS, 2, HALF] with the pair moved to the end.
        left, right = tl.split(sums.reshape(ROWS, 2, HALF).permute(0, 2, 1))
        store_sums(
            out, left, a_scale, b_scale, bias, row, column, m, n, a_scale_row, b_scale_row,
            A_ROWS, B_ROWS, ALONG_K, BIAS, ROWS, HALF, PARTS // 2,
        )  # fmt: skip
        store_sums(
            out, right, a_scale, b_scale, bias, row, column + HALF, m, n, a_scale_row, b_scale_row,
            A_ROWS, B_ROWS, ALONG_K, BIAS, ROWS, HALF, PARTS // 2,
        )  # fmt: skip


@triton.jit
def place_of(tile, down, across, HEIGHT: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """First row and column of a tile [HEIGHT, COLUMNS] of y, which is ``down`` tiles high and ``across`` wide.

    Tiles are numbered in bands of GROUP rows of tiles, in a band down a column first: programs that run side by side
    share at most GROUP tiles of a's rows and a few of b's. The last band may be lower than GROUP.
    """
    first = tile // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    within = tile % (GROUP * across)
    return (first + within % height) * HEIGHT, within // height * COLUMNS


@triton.jit
def compute_tile(
    a, b, a_scale, b_scale, bias, out,  # see scaled_gemm
    row, column, b_row, m, n, k, a_scale_row, a_scale_block, b_scale_row, b_scale_block,  # see tile_sums
    A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, ALONG_K: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, HALVES: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute and store the tile of y that begins at a row and a column."""
    PARTS: tl.constexpr = COLUMNS * out.dtype.element_ty.primitive_bitwidth // 1024  # 128 bytes, a line of cache, a row
    upper, lower = tile_sums(
        a, b, a_scale, b_scale, row, column, b_row, m, k, a_scale_row, a_scale_block, b_scale_row, b_scale_block,
        A_ROWS, B_ROWS, ALONG_K, ROWS, HALVES, COLUMNS, BLOCK,
    )  # fmt: skip
    store_sums(
        out, upper, a_scale, b_scale, bias, row, column, m, n, a_scale_row, b_scale_row,
        A_ROWS, B_ROWS, ALONG_K, BIAS, ROWS, COLUMNS, PARTS,
    )  # fmt: skip
    if HALVES == 2:
        store_sums(
            out, lower, a_scale, b_scale, bias, row + ROWS, column, m, n, a_scale_row, b_scale_row,
            A_ROWS, B_ROWS, ALONG_K, BIAS, ROWS, COLUMNS, PARTS,
        )  # fmt: skip


@triton.jit
def scaled_gemm(
    a, b,  # descriptors of codes: [M, K] in boxes [ROWS, BLOCK], [N, K] in boxes [COLUMNS, BLOCK], row-major
    a_scale, b_scale,  # float32, or uint8 (E8M0), with the strides below
    bias, out, m, n, k,  # [N], read with BIAS; [M, N] row-major, contiguous
    a_scale_row, a_scale_block, b_scale_row, b_scale_block,  # elements from group to group of rows, block to block of K
    A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, ALONG_K: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, HALVES: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute all tiles of y.

        y = Σ_blocks (a[:, block] @ b[:, block].T) · a_scale[:, block] · b_scale[:, block].T + bias

    A program owns every num_programs-th tile of y, [ROWS · HALVES, COLUMNS] each. One program a multiprocessor is
    launched, since a tile's sums take most of its registers.
    """
    down = tl.cdiv(m, ROWS * HALVES)
    across = tl.cdiv(n, COLUMNS)
    for tile in range(tl.program_id(0), down * across, tl.num_programs(0)):
        row, column = place_of(tile, down, across, ROWS * HALVES, COLUMNS, GROUP)
        compute_tile(
            a, b, a_scale, b_scale, bias, out, row, column, column, m, n, k,
            a_scale_row, a_scale_block, b_scale_row, b_scale_block,
            A_ROWS, B_ROWS, ALONG_K, BIAS, ROWS, HALVES, COLUMNS, BLOCK,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales as a kernel reads them: ``values`` with a stride for each dimension, 0 where one scale serves all of it.

    Attributes:
        values: float32 or E8M0 bytes.
        rows: how many rows of the operand share a scale; 0 if all do.
        stride_matrix: elements from one matrix's scales to the next one's.
        stride_row: elements from one group of rows to the next.
        stride_block: elements from one block of K to the next.
    """

    values: Tensor
    rows: int
    stride_matrix: int
    stride_row: int
    stride_block: int

    @classmethod
    def of(cls, q: QuantizedTensor) -> "Scales":
        """The scales of a matrix, or of a stack of them."""
        if isinstance(q.granularity, PerTensor):
            return cls(q.scale, 0, 0, 0, 0)
        rows = q.granularity.rows if isinstance(q.granularity, PerBlock) else 1
        *stack, row, block = q.scale.stride()
        matrix = stack[0] if stack else 0
        block *= q.scale.shape[-1] > 1  # one block along K serves all of the kernel's
        return cls(q.scale, 0, matrix, 0, block) if rows >= q.shape[-2] else cls(q.scale, rows, matrix, row, block)

    def columnwise(self, n: int, columns: int) -> "Scales":
        """Copy scales, where needed, so that those of neighbouring columns of y are neighbours, in whole tiles of them.

        A load takes several then, and needs no mask.
        """
        if self.rows % columns == 0:  # one scale for a tile, or (rows is 0) for all
            return self
        groups = -(-(n + -n % columns) // self.rows)  # of whole tiles: those beyond n are zeros, and are not stored
        *stack, present, blocks = self.values.shape
        if self.stride_row == 1 and present == groups:
            return self
        values = self.values.new_zeros((*stack, blocks, groups))
        values[..., :present] = self.values.transpose(-1, -2)
        return Scales(values, self.rows, blocks * groups, 1, groups if self.stride_block else 0)


def product(a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Multiply ``a @ b.T + bias``, rounded once; octavo.kernels' reference backend is the definition.

    Args:
        a: [M, K], E4M3 or E5M2.
        b: [N, K], E4M3 or E5M2. Where blocks of both operands share scales along K, they are equally wide.
        bias: [N] or None.
        out_dtype: float32, bfloat16 or float16.

    Returns:
        [M, N], contiguous. The host does not wait for the device; a CUDA graph can be captured once the kernel is
        compiled, by its first call.
    """
    m, n, k = a.shape[0], b.shape[0], a.shape[1]
    out = a.data.new_empty((m, n), dtype=out_dtype)
    block, along_k = block_width((a.granularity, b.granularity), k)
    tile, count = choose_tile(m, n, out.device, block)
    left, right = k_major(a.data), k_major(b.data)
    a_scales, b_scales = Scales.of(a), Scales.of(b)
    if along_k:
        b_scales = b_scales.columnwise(n, tile.columns)
    with launching.on_device_of(out):
        launching.launch(
            scaled_gemm,
            (count,),
            TensorDescriptor.from_tensor(left, [tile.rows, block]),
            TensorDescriptor.from_tensor(right, [tile.columns, block]),
            *(a_scales.values, b_scales.values, out if bias is None else bias, out, m, n, k),
            *(a_scales.stride_row, a_scales.stride_block, b_scales.stride_row, b_scales.stride_block),
            A_ROWS=a_scales.rows or tile.rows,
            B_ROWS=b_scales.rows or tile.columns,
            ALONG_K=along_k,
            BIAS=bias is not None,
            GROUP=GROUP,
            **tile_constants(tile, block),
        )
    return out


def block_width(granularities: tuple[Granularity, Granularity], k: int) -> tuple[int, bool]:
    """Number of elements of K that are summed at once, and whether scales change from one such block to the next.

    Example:
        >>> block_width((PerBlock(1, 32), PerTensor()), 1000), block_width((PerBlock(1, 32), PerTensor()), 32)
        ((32, True), (128, False))
    """
    widths = [g.columns for g in granularities if isinstance(g, PerBlock) and g.columns < k]
    return (widths[0], True) if widths else (CHAIN, False)


def k_major(codes: Tensor) -> Tensor:
    """The codes with contiguous rows that begin at multiples of 16 bytes: themselves, or a copy.

    Args:
        codes: [R, K], or [E, R, K], whose matrices must follow each other to be taken as they are.

    Example:
        >>> codes = torch.ones(2, 32, dtype=torch.uint8)
        >>> k_major(codes) is codes, k_major(codes.t()).stride()
        (True, (16, 1))
    """
    # A stack is read as one matrix, so its matrices must follow each other.
    row = codes.shape[-1]
    if is_k_major(codes) and (codes.ndim == 2 or codes.stride(0) == codes.shape[1] * codes.stride(1)):
        return codes
    padded = codes.new_empty((*codes.shape[:-1], row + -row % ALIGNMENT))[..., :row]
    padded.view(torch.uint8).copy_(codes.view(torch.uint8))
    return padded


def is_k_major(codes: Tensor) -> bool:
    """Whether TMA reads a matrix as it is: contiguous rows whose distance and address are multiples of 16 bytes."""
    row, side_by_side = codes.stride(-2), codes.stride(-1) == 1
    return side_by_side and row >= codes.shape[-1] and row % ALIGNMENT == 0 and codes.data_ptr() % ALIGNMENT == 0


def choose_tile(m: int, n: int, device: torch.device, block: int, groups: int = 1) -> tuple[Tile, int]:
    """The tile that covers [m, n] in the least time, and how many programs share the work.

    Narrow blocks spend their time on scaling, not on fetching codes: tiles of two halves would not help. Rows of
    different groups share no tile, so each further group is taken for half a tile more.
    """

    def count(tile: Tile) -> int:
        height = tile.rows * tile.halves
        return -(-(m + (groups - 1) * height // 2) // height) * -(-n // tile.columns)

    return cheapest_tile(count, device, [tile for tile in TILES if tile.halves == 1 or block == CHAIN])


def cheapest_tile(count: Callable[[Tile], int], device: torch.device, tiles: Sequence[Tile]) -> tuple[Tile, int]:
    """The tile that does all work in the least time if there are ``count`` of it, and how many programs share them."""
    at_once = programs(device)
    tile = min(tiles, key=lambda tile: -(-count(tile) // at_once) * tile.cost)
    return tile, min(count(tile), at_once)


def programs(device: torch.device) -> int:
    """Number of programs that share the tiles: one for each multiprocessor; a few in the interpreter."""
    return 3 if INTERPRETED else launching.multiprocessors(device)  # 3: each takes several tiles in tests too


def tile_constants(tile: Tile, block: int) -> dict[str, Any]:
    """A tile as the keyword arguments of a launch."""
    return {
        "ROWS": tile.rows,
        "HALVES": tile.halves,
        "COLUMNS": tile.columns,
        "BLOCK": block,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }

"""Grouped GEMM of experts: each row of x times its own expert's weight, all experts in one launch.

    y[t] = Σ_blocks (x[t, block] @ w[e, :, block].T) · scales,    offsets[e] ≤ t < offsets[e + 1]

Rows are sorted by expert, so that an expert's rows lie together. ``offsets`` is in device memory, and every program
reads it there, so that the host does not wait: a program counts the tiles of all experts, and derives a tile's expert
and place from its number. A tile of x may reach into the next expert's rows; its results for those are not written.

The tile itself, operands' layouts and the order of sums are those of gemm.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.triton import gemm, launching
from octavo.numerics import QuantizedTensor

__all__ = ["grouped_product"]

compute_tile = gemm.compute_tile  # a kernel finds device functions among its module's globals


@triton.jit
def scaled_grouped_gemm(
    a,  # descriptor of codes [T, K] in boxes [ROWS, BLOCK], row-major
    b,  # descriptor of codes [E · N, K] in boxes [COLUMNS, BLOCK], row-major: the weights below each other
    a_scale, b_scale,  # float32, or uint8 (E8M0), with the strides below
    offsets,  # int32 or int64 [E + 1]
    out, tokens, experts, n, k,  # [T, N] row-major, contiguous; T, E, N, K
    a_scale_row, a_scale_block, b_scale_matrix, b_scale_row, b_scale_block,
    A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, ALONG_K: tl.constexpr, EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, HALVES: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute all tiles of y, [T, N]: gemm.scaled_gemm for each expert's rows.

    A program owns every num_programs-th tile, whichever expert's it is, so that experts of few rows leave no
    multiprocessor idle. EXPERTS is a power of two, E or more: the bookkeeping is done on blocks [EXPERTS] in registers.
    """
    across = tl.cdiv(n, COLUMNS)
    each = tl.arange(0, EXPERTS)
    # Offsets of a GPU are not checked by the host: within 0 and T no wrong one reads or writes elsewhere.
    starts = tl.maximum(tl.load(offsets + each, mask=each < experts, other=0).to(tl.int32), 0)
    ends = tl.minimum(tl.load(offsets + 1 + each, mask=each < experts, other=0).to(tl.int32), tokens)
    down = tl.cdiv(tl.maximum(ends - starts, 0), ROWS * HALVES)  # rows of tiles; 0 of an expert without rows
    finished = tl.cumsum(down, 0) * across
    for tile in range(tl.program_id(0), tl.sum(down, 0) * across, tl.num_programs(0)):
        # Experts all of whose tiles have lower numbers; how many there are is this tile's expert.
        before = finished <= tile
        expert = tl.sum(before.to(tl.int32), 0)
        within = tile - tl.sum(tl.where(before, down, 0), 0) * across
        height = tl.sum(tl.where(each == expert, down, 0), 0)  # down[expert]: a block in registers takes no index
        end = tl.sum(tl.where(each == expert, ends, 0), 0)
        row = tl.sum(tl.where(each == expert, starts, 0), 0) + within % height * (ROWS * HALVES)
        column = within // height * COLUMNS  # an expert's rows one after the other: they share the weight's codes
        scale = b_scale + expert.to(tl.int64) * b_scale_matrix
        # `end` in place of M masks scales and stores of the next expert's rows; `out` is a bias that is not read.
        compute_tile(
            a, b, a_scale, scale, out, out, row, column, expert * n + column, end, n, k,
            a_scale_row, a_scale_block, b_scale_row, b_scale_block,
            A_ROWS, B_ROWS, ALONG_K, False, ROWS, HALVES, COLUMNS, BLOCK,
        )  # fmt: skip


def grouped_product(a: QuantizedTensor, b: QuantizedTensor, offsets: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Multiply ``y[t] = a[t] @ b[expert of t].T``; the loop in octavo.kernels.grouped is the definition.

    Args:
        a: [T, K], E4M3 or E5M2.
        b: [E, N, K], E4M3 or E5M2.
        offsets: [E + 1], int32 or int64: expert e has the rows from offsets[e] to offsets[e + 1].
        out_dtype: float32, bfloat16 or float16.

    Returns:
        [T, N], contiguous; rows of no expert are not written.
    """
    (tokens, k), (experts, n, _) = a.shape, b.shape
    out = a.data.new_empty((tokens, n), dtype=out_dtype)
    block, along_k = gemm.block_width((a.granularity, b.granularity), k)
    tile, programs = gemm.choose_tile(tokens, n, out.device, block, experts)
    left = gemm.k_major(a.data)
    right = gemm.k_major(gemm.k_major(b.data).flatten(0, 1))  # flattening forgets the stride of a single row
    a_scales, b_scales = gemm.Scales.of(a), gemm.Scales.of(b)
    if along_k:
        b_scales = b_scales.columnwise(n, tile.columns)
    with launching.on_device_of(out):
        launching.launch(
            scaled_grouped_gemm,
            (programs,),
            TensorDescriptor.from_tensor(left, [tile.rows, block]),
            TensorDescriptor.from_tensor(right, [tile.columns, block]),
            *(a_scales.values, b_scales.values, offsets, out, tokens, experts, n, k),
            *(a_scales.stride_row, a_scales.stride_block),
            *(b_scales.stride_matrix, b_scales.stride_row, b_scales.stride_block),
            A_ROWS=a_scales.rows or tile.rows,
            B_ROWS=b_scales.rows or tile.columns,
            ALONG_K=along_k,
            EXPERTS=launching.next_power_of_2(experts),
            **gemm.tile_constants(tile, block),
        )
    return out

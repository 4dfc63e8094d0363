"""Run products whose tensors end, or begin, where memory does: reading or writing beyond them ends the process.

    python -m tests.triton.guarded

For Triton's interpreter, whose addresses are the CPU's. What a program reads for rows that it does not write changes no
result, nor does what it writes behind them, so no comparison would notice. Prints the name of each product that it has
survived.
"""

import ctypes
import itertools
import mmap
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from octavo.formats import E4M3
from octavo.kernels.triton import gemm
from octavo.kernels.triton.grouped_gemm import grouped_product
from octavo.numerics import Granularity, PerBlock, PerRow, PerTensor, QuantizedTensor, quantize
from octavo.numerics.accumulate import CHAIN
from tests.interpreter import prepare_interpreter

NO_ACCESS = 0
FORBIDDEN = 1 << 20  # bytes on both sides
PAIRS: tuple[tuple[Granularity, Granularity], ...] = (
    (PerBlock(1, 128), PerBlock(128, 128)),
    (PerBlock(1, 128), PerBlock(1, 128)),
    (PerBlock(1, 32), PerBlock(1, 32)),
    (PerRow(), PerRow()),
    (PerTensor(), PerTensor()),
)
M, N, K = 20, 150, 272  # K in whole lines of 16 bytes, so that codes are not copied
_protect = ctypes.CDLL(None, use_errno=True).mprotect
_protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_new_empty = Tensor.new_empty
_memory: list[mmap.mmap] = []  # as long as its tensors


def guarded(x: Tensor, *, at_end: bool) -> Tensor:
    """A copy of ``x`` at the end, or the beginning, of memory between what nobody may touch."""
    own = x.flatten().view(torch.uint8)
    room = -(-own.numel() // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, FORBIDDEN + room + FORBIDDEN)
    _memory.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for forbidden in (start, start + FORBIDDEN + room):
        assert _protect(forbidden, FORBIDDEN, NO_ACCESS) == 0
    first = FORBIDDEN + (room - own.numel() if at_end else 0)
    held = torch.frombuffer(memory, dtype=torch.uint8, offset=first, count=own.numel()).copy_(own)
    return held.view(x.dtype).view(x.shape)


def operand(shape: tuple[int, ...], granularity: Granularity, *, at_end: bool) -> QuantizedTensor:
    q = quantize(torch.randn(shape).flatten(0, -2), E4M3, granularity=granularity)
    scale = q.scale if isinstance(granularity, PerTensor) else q.scale.view(*shape[:-2], -1, q.scale.shape[-1])
    data = q.data.view(torch.uint8).view(shape).view(q.data.dtype)
    return replace(q, data=guarded(data, at_end=at_end), scale=guarded(scale, at_end=at_end))


def only_guarded_memory(*, at_end: bool) -> None:
    """From now on, for results too: both products ask their codes for it."""

    def new_empty(x: Tensor, *shape: Any, **options: Any) -> Tensor:
        made = _new_empty(x, *shape, **options)
        return guarded(made, at_end=at_end) if made.numel() else made  # the interpreter wants some with no elements

    Tensor.new_empty = new_empty  # type: ignore[assignment, method-assign]


def product(pair: tuple[Granularity, Granularity], *, at_end: bool) -> None:
    a, b = operand((M, K), pair[0], at_end=at_end), operand((N, K), pair[1], at_end=at_end)
    gemm.product(a, b, guarded(torch.randn(N), at_end=at_end), torch.bfloat16)


def experts(pair: tuple[Granularity, Granularity], *, at_end: bool) -> None:
    """The first expert's rows begin before x, the last one's end after it."""
    a, b = operand((M, K), pair[0], at_end=at_end), operand((2, 256, K), pair[1], at_end=at_end)
    offsets = guarded(torch.tensor([-9, 13, M + 70], dtype=torch.int32), at_end=at_end)
    grouped_product(a, b, offsets, torch.bfloat16)


def main() -> None:
    prepare_interpreter()
    torch.manual_seed(0)
    for tile, call, pair, at_end in itertools.product(gemm.TILES, (product, experts), PAIRS, (True, False)):
        if tile.halves == 1 or gemm.block_width(pair, K)[0] == CHAIN:
            gemm.TILES = (tile,)
            only_guarded_memory(at_end=at_end)
            call(pair, at_end=at_end)
            end = "end" if at_end else "beginning"
            print(f"{call.__name__} of {pair[0]} by {pair[1]}, tiles of {tile.halves} x {tile.rows}, at the {end}")
            sys.stdout.flush()


if __name__ == "__main__":
    main()

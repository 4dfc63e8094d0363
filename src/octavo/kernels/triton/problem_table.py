"""Tables of problems in device memory, for a kernel that works on several in one launch.

A problem is an entry of int64 numbers: sizes, strides and addresses. The first is how many tiles the problems up to and
with this one have. The table is copied from pinned memory while the host goes on; a CUDA graph would replay that copy
of memory that others use by then, so graphs do not capture such launches (octavo/kernels/each.py).
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["find_problem", "problem_table"]

_FIELDS: tl.constexpr = tl.constexpr(16)  # numbers of an entry


@triton.jit
def find_problem(table, problems, tile, PROBLEMS: tl.constexpr):
    """The entry of a tile's problem in a table, and the numbers of that problem's first tile and of the next one's.

    PROBLEMS is a power of two, ``problems`` or more: the search is a comparison with all of them at once, in registers.
    """
    each = tl.arange(0, PROBLEMS)
    ends = tl.load(table + each.to(tl.int64) * _FIELDS, mask=each < problems, other=0)
    before = (each < problems) & (ends <= tile)
    entry = table + tl.sum(before.to(tl.int64), 0) * _FIELDS
    first = tl.max(tl.where(before, ends, 0), 0)
    return entry, first.to(tl.int32), tl.load(entry).to(tl.int32)


def problem_table(entries: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """Entries in device memory, int64 [problems, 16], zeros behind what they have; the host does not wait.

    Example:
        >>> problem_table([(1, 5), (3, 7)], torch.device("cpu"))[:, :3]
        tensor([[1, 5, 0],
                [3, 7, 0]])
    """
    fields = _FIELDS.value
    rows = [(*entry, *[0] * (fields - len(entry))) for entry in entries]
    return torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)

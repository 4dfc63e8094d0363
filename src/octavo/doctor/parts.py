"""Matrices of which ranks hold parts (FSDP2, tensor parallelism): statistics of the whole from those of the parts."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from octavo.kernels.tracing import is_distributed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["first_row", "over_parts", "rows_alike"]


@torch.no_grad()
def over_parts(numbers: Tensor, matrices: Sequence[Tensor], *, largest: bool = False) -> Tensor:
    """Add the numbers of parts of matrices over the ranks that hold the other parts; or take the largest.

    All matrices share one all-reduce for each dimension of the mesh that divides any; without a divided one, none.

    Args:
        numbers: [fields, matrices] of this rank's parts.
        matrices: the matrices, DTensors where they are divided; the same on all ranks.
        largest: take the largest numbers, and not the sums.
    """
    indices_of: dict[ProcessGroup, list[int]] = {}
    for index, matrix in enumerate(matrices):
        for group in _groups(matrix):
            indices_of.setdefault(group, []).append(index)
    for group, indices in indices_of.items():  # in the order of the matrices, the same on all ranks
        reduced = numbers[:, indices].contiguous()
        distributed.all_reduce(
            reduced, op=distributed.ReduceOp.MAX if largest else distributed.ReduceOp.SUM, group=group
        )
        numbers[:, indices] = reduced
    return numbers


def rows_alike(one: Tensor, other: Tensor) -> bool:
    """Return whether each rank holds the same whole rows of both matrices."""
    if not is_distributed(one) or not is_distributed(other):
        return is_distributed(one) == is_distributed(other)
    layouts: list[Any] = [(each.device_mesh, each.placements) for each in (one, other)]
    by_rows = all(placement.is_replicate() or placement.is_shard(0) for placement in layouts[0][1])
    return by_rows and one.shape == other.shape and layouts[0] == layouts[1]


def first_row(matrix: Tensor) -> int:
    """Number of the first row of this rank's part, from 0."""
    if not is_distributed(matrix):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    layout: Any = matrix
    _, offsets = compute_local_shape_and_global_offset(matrix.shape, layout.device_mesh, layout.placements)
    return offsets[0]


def _groups(matrix: Tensor) -> "Iterator[ProcessGroup]":
    """The groups of ranks that hold other parts of a matrix, one for each dimension of the mesh that divides it."""
    if is_distributed(matrix):
        mesh: Any = matrix.device_mesh
        for dimension, placement in enumerate(matrix.placements):
            if not placement.is_replicate() and mesh.size(dimension) > 1:
                yield mesh.get_group(dimension)

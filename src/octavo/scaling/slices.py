"""Slices of a matrix on several ranks, whose scales are those of the whole matrix.

A slice has all that a scale depends on, or its amaxes are reduced over the ranks that have the others:

| granularity        | rows are divided                     | columns are divided                     |
|--------------------|--------------------------------------|-----------------------------------------|
| ``PerTensor()``    | reduced: one number                  | reduced: one number                     |
| ``PerRow()``       | its own                              | reduced: one number a row               |
| ``PerBlock(r, c)`` | its own; slices are multiples of r   | its own; slices are multiples of c      |
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from octavo.numerics import Granularity, PerBlock, PerRow, PerTensor, measure

__all__ = ["Slices"]


@dataclass(frozen=True, slots=True)
class Slices:
    """Slices of a matrix, one on each rank of a group.

    Attributes:
        dim: the dimension that they divide, 0 (rows) or 1 (columns).
        group: the process group.
        has_past: whether a delayed cast takes the amax of finished steps, which all ranks have reduced; or each rank
            its own, and before the first that of its slice.
        amaxes: returns the whole matrix's, of scaling groups or of those of the transpose, which are reduced with other
            matrices'; None where each cast reduces its own.
    """

    dim: int
    group: Any
    has_past: bool = False
    amaxes: Callable[[Granularity, bool], Tensor] | None = None

    def block(self, granularity: Granularity, *, transposed: bool = False) -> int:
        """Return the size of a block along the divided dimension, which slices must be multiples of."""
        if not isinstance(granularity, PerBlock):
            return 1
        return granularity.columns if self._divides_columns(transposed) else granularity.rows

    def divides_groups(self, granularity: Granularity, *, transposed: bool = False) -> bool:
        """Return whether several ranks have elements of one scaling group."""
        divides_rows = isinstance(granularity, PerRow) and self._divides_columns(transposed)
        return isinstance(granularity, PerTensor) or divides_rows

    @torch.no_grad()
    def amax(self, x: Tensor, granularity: Granularity, *, transposed: bool = False) -> Tensor | None:
        """Return the whole matrix's amaxes, by one MAX all-reduce; None where this rank's slice has all of its groups.

        Args:
            x: this rank's slice.
            granularity: the scaling groups.
            transposed: whether they are those of the transpose.
        """
        if not self.divides_groups(granularity, transposed=transposed):
            return None
        if self.amaxes is not None:
            return self.amaxes(granularity, transposed)
        amax = measure(x.t() if transposed else x, granularity).amax
        distributed.all_reduce(amax, op=distributed.ReduceOp.MAX, group=self.group)
        return amax

    def _divides_columns(self, transposed: bool) -> bool:
        return (self.dim == 1) != transposed

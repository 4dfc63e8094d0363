"""Cast of one rank's rows of a weight, to the codes and scales of the whole weight.

Ranks share the rows of a weight [N, K] in chunks of S = ceil(N / ranks), as ``torch.chunk`` cuts them. The scaling
groups of a cast lie in bands of rows:

| granularity     | of the weight, rows of a band | of its transpose, rows of a band |
|-----------------|-------------------------------|----------------------------------|
| ``PerTensor()`` | N                             | N                                |
| ``PerRow()``    | 1                             | N                                |
| ``PerBlock(r, c)`` | r                          | c                                |

With tensor parallelism the weight is a rank's slice. Its scales are those of the whole weight, whose amaxes are reduced
over the slices too; of the rows of a slice that has other columns, every row's.

A band inside one chunk is measured and cast by its rank alone, and its scales are gathered with the codes. The groups
of a band that several ranks share need the largest of the ranks' amaxes; these are reduced before (see
:mod:`octavo.scaling.step_amaxes`) and passed to the cast as ``amax``. A single band for the whole weight is always
reduced: then every rank knows the scales, and none are gathered.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from octavo.formats import E8M0
from octavo.kernels import cast
from octavo.numerics import AmaxRecord, CastSpec, PerBlock, PerRow, QuantizedTensor, measure
from octavo.numerics.quantized import stored_scale
from octavo.numerics.scaling import scale_from_amax

__all__ = ["ShardCast"]

_NOT_RECORDED = AmaxRecord()


@dataclass(frozen=True, kw_only=True)
class ShardCast:
    """One cast of a weight whose rows ranks share.

    Attributes:
        spec: how to cast.
        transposed: whether the weight's transpose [K, N] is cast.
        shape: N, K of the whole weight, both above 0.
        ranks: number of ranks that share the rows.
        rank: this one.
        reduces_rows: whether the amax of each row is reduced, over ranks that have the row's other columns.
    """

    spec: CastSpec
    transposed: bool
    shape: tuple[int, int]
    ranks: int
    rank: int
    reduces_rows: bool = False

    @cached_property
    def chunk(self) -> int:
        """Rows of a rank; the last ranks may have fewer, or none."""
        return -(-self.shape[0] // self.ranks)

    @cached_property
    def band(self) -> int:
        """Rows of a band."""
        rows, granularity = self.shape[0], self.spec.granularity
        if isinstance(granularity, PerBlock):
            return min(rows, granularity.columns if self.transposed else granularity.rows)
        return 1 if isinstance(granularity, PerRow) and not self.transposed else rows

    @cached_property
    def width(self) -> int:
        """Number of groups of a band."""
        return self.spec.granularity.scale_shape(self._operand_shape(self.band)).numel()

    @cached_property
    def reduced(self) -> tuple[int, ...]:
        """The bands whose amaxes ranks reduce."""
        if self.band == self.shape[0]:
            return (0,)
        if self.reduces_rows:
            return tuple(range(*self.rows(self.rank)))
        ends = range(self.chunk, self.shape[0], self.chunk)
        return tuple(sorted({end // self.band for end in ends if end % self.band}))

    @property
    def gathers_scales(self) -> bool:
        """Whether scales are gathered with the codes."""
        return self.band < self.shape[0]

    def rows(self, rank: int) -> tuple[int, int]:
        """First row of a rank, and the row after its last."""
        return min(rank * self.chunk, self.shape[0]), min((rank + 1) * self.chunk, self.shape[0])

    def measure(self, shard: Tensor) -> Tensor:
        """This rank's amaxes of the reduced bands, float32 [bands, width]; 0 where it has no row.

        Args:
            shard: this rank's rows, [rows, K].
        """
        amaxes = torch.zeros((len(self.reduced), self.width), dtype=torch.float32, device=shard.device)
        for start, end, index in self._parts():
            if index is not None:
                amax = measure(self._operand(shard, start, end), self.spec.granularity).amax
                amaxes[index] = amax.reshape(-1, self.width)
        return amaxes

    def cast(self, shard: Tensor, amaxes: Tensor, record: AmaxRecord = _NOT_RECORDED) -> tuple[Tensor, Tensor]:
        """Cast this rank's rows.

        Args:
            shard: as for :meth:`measure`.
            amaxes: the ranks' largest, shaped as :meth:`measure` returns them.
            record: where to record what is measured.

        Returns:
            Codes as bytes, uint8 [S · K], and scales as bytes, of the bands that begin in this rank's rows; each with
            as many elements on all ranks.
        """
        codes = torch.zeros((self.chunk, self.shape[1]), dtype=torch.uint8, device=shard.device)
        scales = torch.zeros((self._scales_a_rank, self.width), dtype=self._scale_dtype, device=shard.device)
        first, at = self.rows(self.rank)[0], 0
        for start, end, index in self._parts():
            operand = self._operand(shard, start, end)
            shape = self.spec.granularity.scale_shape(operand.shape)
            amax = None if index is None else amaxes[index].reshape(shape)
            part = cast(operand, self.spec, amax=amax, record=record).output
            codes[start - first : end - first] = (part.data.t() if self.transposed else part.data).view(torch.uint8)
            if start % self.band == 0 and self.gathers_scales:
                rows = (part.scale.t() if self.transposed and part.scale.ndim else part.scale).reshape(-1, self.width)
                scales[at : at + len(rows)] = rows
                at += len(rows)
        return codes.flatten(), scales.view(torch.uint8).flatten()

    def whole(self, codes: Tensor, scales: Tensor, amaxes: Tensor, hp_dtype: torch.dtype) -> QuantizedTensor:
        """The whole operand, [N, K] or, of a transposed cast, [K, N], from all ranks' bytes.

        Args:
            codes: uint8, of all ranks in their order; not copied.
            scales: uint8, of all ranks in their order.
            amaxes: as for :meth:`cast`.
            hp_dtype: of the weight.
        """
        rows, columns = self.shape
        data = codes[: rows * columns].view(self.spec.format.torch_dtype).view(rows, columns)
        if self.transposed:
            data = data.t()
        table = self._gathered_scales(scales) if self.gathers_scales else self._scales_of(amaxes)
        shape = self.spec.granularity.scale_shape(data.shape)
        scale = (table.t().contiguous() if self.transposed else table).reshape(shape)
        return QuantizedTensor(data, scale, self.spec.granularity, hp_dtype)

    def _gathered_scales(self, scales: Tensor) -> Tensor:
        """The scales of all bands, [bands, width]."""
        by_rank = scales.view(self._scale_dtype).view(self.ranks, self._scales_a_rank, self.width)
        return torch.cat([by_rank[rank, : self._bands_begun(rank)] for rank in range(self.ranks)])

    def _scales_of(self, amaxes: Tensor) -> Tensor:
        """The scales of the only band, as every cast computes them."""
        spec = self.spec
        scale = scale_from_amax(
            amaxes, spec.format, rounding=spec.scale_rounding, amax_floor=spec.amax_floor, margin=spec.margin
        )
        return stored_scale(scale, spec.scale_format)

    def _parts(self) -> Iterator[tuple[int, int, slice | None]]:
        """First row and end of each part of this rank's rows that one call casts, and its reduced bands' indices."""
        at, stop = self.rows(self.rank)
        if self.reduces_rows and self.gathers_scales and at < stop:
            yield at, stop, slice(None)
            return
        for index, band in enumerate(self.reduced):
            start, end = max(band * self.band, at), min((band + 1) * self.band, stop)
            if start >= end:
                continue
            if at < start:
                yield at, start, None
            yield start, end, slice(index, index + 1)
            at = end
        if at < stop:
            yield at, stop, None

    def _operand(self, shard: Tensor, start: int, end: int) -> Tensor:
        first = self.rows(self.rank)[0]
        part = shard[start - first : end - first]
        return part.t() if self.transposed else part

    def _operand_shape(self, rows: int) -> torch.Size:
        return torch.Size((self.shape[1], rows) if self.transposed else (rows, self.shape[1]))

    def _bands_begun(self, rank: int) -> int:
        """Number of bands whose first row is one of a rank's."""
        start, end = self.rows(rank)
        return -(-end // self.band) + -start // self.band

    @property
    def _scales_a_rank(self) -> int:
        """Most bands that begin in the rows of one rank; 0 where no scales are gathered."""
        return -(-self.chunk // self.band) if self.gathers_scales else 0

    @property
    def _scale_dtype(self) -> torch.dtype:
        return torch.uint8 if self.spec.scale_format == E8M0 else torch.float32

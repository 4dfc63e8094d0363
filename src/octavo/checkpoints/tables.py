"""Embedding table stored as rows of FP8 codes with one scale each; some rows stay in BF16.

    PATH.table.codes       E4M3 [V - R, D]      all other rows, in order
    PATH.table.scale       float32 [V - R, 1]   decode scales: row ≈ codes · scale
    PATH.table.bf16        bfloat16 [R, D]      rows in BF16
    PATH.table.bf16_rows   int32 [R]            their indices, ascending

These tensors replace PATH.weight in octavo's own format; no other format supports them. A loaded model holds the
decoded rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo import recipes
from octavo.checkpoints.names import checked_scale
from octavo.checkpoints.tensor_files import AGAIN, TensorFiles
from octavo.errors import CheckpointError
from octavo.functional import quantize_operand
from octavo.numerics import PerRow, QuantizedTensor

__all__ = ["CodedTable", "table_names"]

ROLES = ("codes", "scale", "bf16", "bf16_rows")


def table_names(path: str) -> tuple[str, ...]:
    """Names of a table's tensors."""
    return tuple(f"{path}.table.{role}" for role in ROLES)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedTable:
    """Table as FP8 codes and BF16 rows.

    Attributes:
        codes: codes and scales of the rows that are not in BF16.
        bf16: rows in BF16, bfloat16 [R, D].
        bf16_rows: their indices, int64 [R], ascending.
    """

    codes: QuantizedTensor
    bf16: Tensor
    bf16_rows: Tensor

    @classmethod
    def of(cls, table: Tensor, bf16_rows: Tensor) -> "CodedTable":
        """Cast the rows of a table [V, D], except those with the given indices, in any order.

        Example:
            >>> table = torch.tensor([[1.0, 0.3], [0.1, 0.7]])
            >>> CodedTable.of(table, torch.tensor([1])).decoded()
            tensor([[1.0000, 0.2857],
                    [0.1001, 0.6992]])
        """
        table, rows = table.detach(), bf16_rows.to(device=table.device, dtype=torch.int64).unique()
        spec = recipes.get("weight_only").output.b
        assert spec is not None
        codes = quantize_operand(table[_others(rows, len(table))], spec)
        return cls(codes=codes, bf16=table[rows].to(torch.bfloat16), bf16_rows=rows)

    @classmethod
    def read(cls, path: str, files: TensorFiles, shape: torch.Size) -> "CodedTable":
        """Read the tensors of a table with this shape [V, D].

        Raises:
            CheckpointError: a tensor is missing, or has an invalid dtype, shape or value.
        """
        if missing := [name for name in table_names(path) if name not in files]:
            raise CheckpointError(f"the folder has no {missing[0]}; {AGAIN}")
        codes, scale, bf16, rows = (files[name] for name in table_names(path))
        ordered = rows.dtype == torch.int32 and rows.ndim == 1 and bool((rows.diff() > 0).all())
        if not ordered or (len(rows) and not (int(rows[0]) >= 0 and int(rows[-1]) < shape[0])):
            raise CheckpointError(f"{path}.table.bf16_rows are not ascending numbers of its {shape[0]} rows; {AGAIN}")
        for role, each, dtype, count in (
            ("codes", codes, torch.float8_e4m3fn, shape[0] - len(rows)),
            ("bf16", bf16, torch.bfloat16, len(rows)),
        ):
            if each.dtype != dtype or each.shape != (count, shape[1]) or not each.float().isfinite().all():
                raise CheckpointError(
                    f"{path}.table.{role} is {each.dtype} {list(each.shape)}, or not finite; it has to be {dtype} "
                    f"{[count, shape[1]]}; {AGAIN}"
                )
        checked = checked_scale(f"{path}.table.scale", scale, PerRow(), codes.shape)
        return cls(
            codes=QuantizedTensor(codes, checked, PerRow(), torch.float32), bf16=bf16, bf16_rows=rows.to(torch.int64)
        )

    @property
    def shape(self) -> tuple[int, int]:
        """[V, D]."""
        return len(self.codes.data) + len(self.bf16_rows), self.bf16.shape[1]

    def decoded(self) -> Tensor:
        """Decoded table, float32 [V, D]."""
        table = self.bf16.new_empty(self.shape, dtype=torch.float32)
        table[_others(self.bf16_rows, len(table))] = self.codes.dequantize().float()
        table[self.bf16_rows] = self.bf16.float()
        return table

    def tensors(self, path: str) -> dict[str, Tensor]:
        """Tensors to write, by name."""
        return dict(
            zip(table_names(path), (self.codes.data, self.codes.scale, self.bf16, self.bf16_rows.int()), strict=True)
        )


def _others(rows: Tensor, count: int) -> Tensor:
    """Mask of the rows, of ``count``, that are not in ``rows``."""
    return torch.ones(count, dtype=torch.bool, device=rows.device).index_fill(0, rows, False)

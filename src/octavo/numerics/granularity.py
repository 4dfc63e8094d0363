"""Granularities: the sets of elements that share a scale.

| granularity        | tensor  | scale shape                        | elements per scale |
|--------------------|---------|------------------------------------|--------------------|
| ``PerTensor()``    | any     | ``[]``                             | all                |
| ``PerRow()``       | [M, K]  | ``[M, 1]``                         | K                  |
| ``PerRow()``       | [B,M,K] | ``[B, M, 1]``                      | K                  |
| ``PerBlock(r, c)`` | [M, K]  | ``[ceil(M / r), ceil(K / c)]``     | r · c              |

K is the dimension a GEMM sums over and is always last: a row of an operand is what one output element reads. Edge
blocks of a ragged shape are smaller; nothing is padded into their maximum.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from octavo.errors import ConfigError

__all__ = [
    "Granularity",
    "PerBlock",
    "PerRow",
    "PerTensor",
    "granularity_as_list",
    "granularity_from_list",
    "granularity_in_words",
    "granularity_or_default",
    "stacks",
]


class Granularity(Protocol):
    """Interface of every granularity: the scaling groups of a tensor."""

    @property
    def orientation_free(self) -> bool:
        """Return whether a tensor and its transpose have the same groups, so that one quantization serves both."""
        ...

    def scale_shape(self, shape: torch.Size) -> torch.Size:
        """Shape of the scale of a tensor of this shape."""
        ...

    def reduce_max(self, magnitudes: Tensor) -> Tensor:
        """Largest magnitude of every group, shaped as the scale; 0 for an empty group."""
        ...

    def expand(self, scale: Tensor, shape: torch.Size) -> Tensor:
        """The scale in a shape that broadcasts against a tensor of ``shape``."""
        ...


@dataclass(frozen=True, slots=True)
class PerTensor:
    """One scale for the whole tensor.

    Example:
        >>> PerTensor().scale_shape(torch.Size([4, 8]))
        torch.Size([])
    """

    @property
    def orientation_free(self) -> bool:
        """True: the transpose has the same single group."""
        return True

    def scale_shape(self, shape: torch.Size) -> torch.Size:
        """``[]``."""
        return torch.Size([])

    def reduce_max(self, magnitudes: Tensor) -> Tensor:
        """Maximum over everything, ``[]``."""
        return magnitudes.amax() if magnitudes.numel() else magnitudes.new_zeros(())

    def expand(self, scale: Tensor, shape: torch.Size) -> Tensor:
        """The scale itself: a scalar broadcasts."""
        return scale


@dataclass(frozen=True, slots=True)
class PerRow:
    """One scale per row: the last dimension is reduced.

    Example:
        >>> PerRow().scale_shape(torch.Size([4, 8]))
        torch.Size([4, 1])
    """

    @property
    def orientation_free(self) -> bool:
        """False: the transpose's rows are the columns."""
        return False

    def scale_shape(self, shape: torch.Size) -> torch.Size:
        """``[..., 1]``."""
        _check_dimensions(shape, 1, "PerRow")
        return torch.Size([*shape[:-1], 1])

    def reduce_max(self, magnitudes: Tensor) -> Tensor:
        """Maximum over the last dimension, kept as 1."""
        shape = self.scale_shape(magnitudes.shape)
        return magnitudes.amax(dim=-1, keepdim=True) if magnitudes.shape[-1] else magnitudes.new_zeros(shape)

    def expand(self, scale: Tensor, shape: torch.Size) -> Tensor:
        """The scale itself: a last dimension of 1 broadcasts."""
        return scale


@dataclass(frozen=True, slots=True)
class PerBlock:
    """One scale per block of ``rows`` x ``columns``; DeepSeek-style 1x128 and 128x128 are the usual ones.

    Example:
        >>> PerBlock(1, 128).scale_shape(torch.Size([3, 300]))
        torch.Size([3, 3])
    """

    rows: int
    columns: int

    def __post_init__(self) -> None:
        if min(self.rows, self.columns) < 1 or self.rows % 1 or self.columns % 1:
            raise ConfigError(f"a block needs at least 1 row and 1 column, not {self.rows}x{self.columns}")

    @property
    def orientation_free(self) -> bool:
        """Return whether blocks are square."""
        return self.rows == self.columns

    def scale_shape(self, shape: torch.Size) -> torch.Size:
        """``[ceil(M / rows), ceil(K / columns)]``."""
        _check_dimensions(shape, 2, "PerBlock")
        return torch.Size([*shape[:-2], -(-shape[-2] // self.rows), -(-shape[-1] // self.columns)])

    def reduce_max(self, magnitudes: Tensor) -> Tensor:
        """Maximum over each block."""
        *leading, block_rows, block_columns = self.scale_shape(magnitudes.shape)
        if not magnitudes.numel():
            return magnitudes.new_zeros((*leading, block_rows, block_columns))
        rows, columns = self._within(magnitudes.shape)
        row_padding = block_rows * rows - magnitudes.shape[-2]
        column_padding = block_columns * columns - magnitudes.shape[-1]
        padded = torch.nn.functional.pad(magnitudes, (0, column_padding, 0, row_padding))  # zeros never are the maximum
        return padded.reshape(*leading, block_rows, rows, block_columns, columns).amax(dim=(-3, -1))

    def expand(self, scale: Tensor, shape: torch.Size) -> Tensor:
        """Every scale repeated over its block, cropped to ``shape``."""
        rows, columns = self._within(shape)
        full = scale.repeat_interleave(rows, dim=-2).repeat_interleave(columns, dim=-1)
        return full[..., : shape[-2], : shape[-1]]

    def _within(self, shape: torch.Size) -> tuple[int, int]:
        """Rows and columns of a block of this shape, which may be smaller than one."""
        return min(self.rows, shape[-2]), min(self.columns, shape[-1])


def granularity_or_default(granularity: Granularity | None) -> Granularity:
    """Return the requested granularity; None means one scale for the tensor.

    Raises:
        ConfigError: ``granularity`` is something else, such as a name.

    Example:
        >>> granularity_or_default(None)
        PerTensor()
    """
    if granularity is None:
        return PerTensor()
    if not isinstance(granularity, PerTensor | PerRow | PerBlock):
        raise ConfigError(
            f"granularity must be octavo.PerTensor(), PerRow() or PerBlock(rows, columns), not {granularity!r}"
        )
    return granularity


def _check_dimensions(shape: torch.Size, least: int, name: str) -> None:
    if len(shape) < least:
        raise ConfigError(f"{name} needs a tensor of at least {least} dimension(s), not shape {tuple(shape)}")


def granularity_as_list(granularity: Granularity) -> list[int]:
    """A granularity as an operator's argument: [] per tensor, [1] per row, [rows, columns] of a block.

    Example:
        >>> granularity_as_list(PerBlock(1, 128)), granularity_from_list([1])
        ([1, 128], PerRow())
    """
    if isinstance(granularity, PerBlock):
        return [granularity.rows, granularity.columns]
    return [1] if isinstance(granularity, PerRow) else []


def granularity_from_list(values: list[int] | None) -> Granularity:
    """Inverse of :func:`granularity_as_list`; AOTInductor's loader passes an empty list as None."""
    if not values:
        return PerTensor()
    return PerBlock(*values) if len(values) == 2 else PerRow()


def granularity_in_words(granularity: Granularity) -> str:
    """Scaling group in words, after "one scale per".

    Example:
        >>> granularity_in_words(PerTensor()), granularity_in_words(PerBlock(1, 128))
        ('tensor', '1×128 block')
    """
    if isinstance(granularity, PerBlock):
        return f"{granularity.rows}×{granularity.columns} block"
    return "row" if isinstance(granularity, PerRow) else "tensor"


def stacks(granularity: Granularity, shape: torch.Size) -> bool:
    """Return whether the matrices of a tensor, put below each other, have the same groups as one by one.

    Example:
        >>> stacks(PerBlock(128, 128), torch.Size([2, 256, 64])), stacks(PerBlock(128, 128), torch.Size([2, 200, 64]))
        (True, False)
    """
    return not isinstance(granularity, PerBlock) or len(shape) < 3 or shape[-2] % granularity.rows == 0

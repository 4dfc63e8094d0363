"""The ranks that train one model together, and the small values that they exchange.

A rank is a process. One that trains alone is a rank too, the only one, and needs no process group. Values are exchanged
on the CPU where the process group has a backend for it, so that no GPU is waited for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

__all__ = ["ALONE", "Ranks", "named_ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among those of the default process group.

    Attributes:
        rank: number of this rank, from 0.
        size: number of ranks.
        tensor: number of ranks that share each layer and therefore compute the same micro-batches; they are numbered
            one after the other.

    Example:
        >>> Ranks.current().gathered("here")
        ['here']
    """

    rank: int = 0
    size: int = 1
    tensor: int = 1

    @classmethod
    def current(cls, *, tensor: int = 1) -> "Ranks":
        """The ranks of the default process group; one alone without it."""
        if distributed.is_available() and distributed.is_initialized():
            return cls(rank=distributed.get_rank(), size=distributed.get_world_size(), tensor=tensor)
        return ALONE

    @property
    def is_first(self) -> bool:
        """Return whether this rank writes files and prints."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Number of this rank's share of the micro-batches, from 0."""
        return self.rank // self.tensor

    @property
    def data_size(self) -> int:
        """Number of shares of the micro-batches."""
        return self.size // self.tensor

    def gathered(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value)
        return values

    def gathered_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of all ranks, in their order, by one collective; as many on each rank."""
        if self.size == 1:
            return [list(numbers)]
        own = torch.tensor(numbers, dtype=torch.float64, device=_exchange_device())
        rows = [torch.empty_like(own) for _ in range(self.size)]
        distributed.all_gather(rows, own)
        return torch.stack(rows).tolist()

    def wait(self) -> None:
        """Wait until all ranks are here."""
        self.gathered_numbers([0.0])


ALONE = Ranks()


def named_ranks(ranks: Sequence[int]) -> str:
    """Ranks in a sentence.

    Example:
        >>> named_ranks([0, 2])
        'ranks 0, 2'
    """
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def _exchange_device() -> torch.device:
    """The CPU if the default process group has a backend for it, otherwise the current GPU."""
    return torch.device("cpu" if "cpu" in distributed.get_backend_config() else "cuda")

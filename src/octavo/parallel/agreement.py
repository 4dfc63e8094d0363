"""Comparison of what must be equal on all ranks: versions and settings once, state every few steps.

Ranks that differ train on without an error, each with gradients of the others' models. A comparison of state is one
collective of one number, a digest; only where digests differ are the values themselves exchanged, to name what differs.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.parallel.ranks import Ranks

__all__ = ["require_equal", "require_equal_state"]


def require_equal(ranks: Ranks, values: Mapping[str, object], *, advice: str) -> None:
    """Compare values by name.

    Args:
        ranks: all of them call this.
        values: the values of this rank.
        advice: end of the error's sentence.

    Raises:
        ConfigError: a value differs; on all ranks, with the name, the ranks and their values.

    Example:
        >>> require_equal(Ranks(), {"training.seed": 3}, advice="give all ranks the same configuration")
    """
    by_rank = ranks.gathered(dict(values))
    for name in dict.fromkeys(name for theirs in by_rank for name in theirs):
        column = [theirs.get(name) for theirs in by_rank]
        if any(value != column[0] for value in column):
            _refuse(name, column, advice)


@torch.no_grad()
def require_equal_state(
    ranks: Ranks, tensors: Mapping[str, Tensor], values: Mapping[str, object], *, advice: str
) -> None:
    """Compare tensors and values by name, with one collective of one number where all are equal.

    A tensor's digest is the sum of its bits as integers: one that is equal in all elements but one differs.

    Args:
        ranks: all of them call this.
        tensors: tensors of this rank, none of them sharded.
        values: other values of this rank.
        advice: end of the error's sentence.

    Raises:
        ConfigError: as :func:`require_equal`; of a tensor, the first element that differs.
    """
    facts = {**values, **dict(zip(tensors, _sums_of_bits(list(tensors.values())), strict=True))}
    digests = ranks.gathered_numbers([zlib.crc32(repr(facts).encode())])
    if all(digest == digests[0] for digest in digests):
        return
    require_equal(ranks, values, advice=advice)
    by_rank = ranks.gathered(facts)
    name = next(name for name in facts if any(theirs.get(name) != facts[name] for theirs in by_rank))
    elements = [theirs.get(name) for theirs in ranks.gathered({name: _elements(tensors.get(name))})]
    require_equal(ranks, {f"{name}, element {i}": value for i, value in enumerate(elements[ranks.rank])}, advice=advice)


def _elements(tensor: Tensor | None) -> list[float]:
    return [] if tensor is None else tensor.flatten().tolist()


def _sums_of_bits(tensors: list[Tensor]) -> list[int]:
    """Sum of each tensor's elements as integers of their bits; one wait for the device."""
    if not tensors:
        return []
    flat = [tensor.detach().contiguous().flatten() for tensor in tensors]
    return torch.stack([each.view(_integers(each)).sum() for each in flat]).tolist()


def _integers(tensor: Tensor) -> torch.dtype:
    return torch.int32 if tensor.element_size() % torch.int32.itemsize == 0 else torch.uint8


def _refuse(name: str, column: Sequence[object], advice: str) -> NoReturn:
    ranks_of: dict[str, list[int]] = {}
    for rank, value in enumerate(column):
        ranks_of.setdefault(repr(value), []).append(rank)
    parts = [f"{value} on {_named(ranks)}" for value, ranks in ranks_of.items()]
    raise ConfigError(f"the ranks differ: {name} is {' and '.join(parts)}; {advice}")


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"

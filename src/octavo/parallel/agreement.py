"""Comparison of what must be equal on all ranks: versions and settings once, state every few steps.

Ranks that differ train on without an error, each with gradients of the others' models. A comparison of state is one
collective of digests; only where digests differ are values exchanged, to name what differs, and of a tensor one
element.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.parallel.ranks import Ranks, named_ranks

__all__ = ["refuse_difference", "require_equal", "require_equal_state"]

CHUNK = 1 << 20  # elements of a digest that take memory at once
ODD, SHIFT = -0x61C8864680B583EB, 29  # 2⁶⁴ over the golden ratio, as int64; multiplication and shift mix all bits


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
        refuse_difference(name, {rank: theirs.get(name) for rank, theirs in enumerate(by_rank)}, advice=advice)


@torch.no_grad()
def require_equal_state(
    ranks: Ranks,
    tensors: Mapping[str, Tensor],
    values: Mapping[str, object],
    *,
    advice: str,
    shards: Sequence[Mapping[str, Tensor]] = (),
) -> None:
    """Compare tensors and values by name, with one collective of a few numbers where all are equal.

    A tensor's digest is a sum of its elements' bits as integers of at most 32 bits, each times an odd number of its
    position. Other elements, or another order of them, go unnoticed with a chance of about 2⁻³²: 32 bits of all digests
    are compared.

    Args:
        ranks: all of them call this.
        tensors: tensors of this rank, none of them sharded.
        values: other values of this rank.
        advice: end of the error's sentence.
        shards: groups of parts of tensors, by names that say which; as many groups on each rank. A group is compared
            among the ranks that have the same parts of it, so tensors divided along other dimensions are another group.

    Raises:
        ConfigError: as :func:`require_equal`; of a tensor, an element that differs.
    """
    common, of_groups = dict(values) | _digests(tensors), [_digests(group) for group in shards]
    digests = [_crc(common), *(_crc(each) for sums in of_groups for each in (list(sums), sums))]
    shared_digests, *columns = zip(*ranks.gathered_numbers(digests), strict=True)
    names_and_sums = zip(columns[::2], columns[1::2], strict=True)
    equal_parts = all(len(set(zip(*pair, strict=True))) == len(set(pair[0])) for pair in names_and_sums)
    if len(set(shared_digests)) == 1 and equal_parts:
        return
    parts = {name: part for group in shards for name, part in group.items()}
    of_parts = {name: digest for sums in of_groups for name, digest in sums.items()}
    require_equal(ranks, values, advice=advice)
    for shared, own in ((True, tensors), (False, parts)):
        by_rank = ranks.gathered(common if shared else of_parts)
        for name in dict.fromkeys(name for theirs in by_rank for name in theirs):
            holders = [rank for rank, theirs in enumerate(by_rank) if shared or name in theirs]
            if len({by_rank[rank].get(name) for rank in holders}) > 1:
                _refuse_tensor(ranks, name, own.get(name), holders, advice)


def refuse_difference(name: str, values: Mapping[int, object], *, advice: str) -> None:
    """Compare values that the ranks have exchanged.

    Raises:
        ConfigError: they differ; with the name, the ranks and their values.
    """
    if any(value != next(iter(values.values())) for value in values.values()):
        _refuse(name, values, advice)


def _refuse_tensor(ranks: Ranks, name: str, tensor: Tensor | None, holders: Sequence[int], advice: str) -> NoReturn:
    """Refuse a tensor whose digest differs, with the first element that does.

    It is found by digests of halves, since a tensor may be as large as the memory.
    """
    flat = torch.empty(0) if tensor is None else tensor.detach().contiguous().flatten()
    gathered = ranks.gathered(tuple(tensor.shape) if tensor is not None else None)
    refuse_difference(f"the shape of {name}", {rank: gathered[rank] for rank in holders}, advice=advice)
    start, end = 0, math.prod(gathered[holders[0]])
    while end - start > 1:
        middle = (start + end) // 2
        halves = ranks.gathered_numbers(_halves_of_digest(flat[start:middle]))
        start, end = (start, middle) if len({tuple(halves[rank]) for rank in holders}) > 1 else (middle, end)
    shown = ranks.gathered([(each.item(), each.view(_integers(each)).item()) for each in flat[start:end]])
    numbers, bits = ({rank: shown[rank][0][index] for rank in holders} for index in (0, 1))
    if len(set(map(repr, numbers.values()))) > 1:
        _refuse(f"{name}, element {start}", numbers, advice)
    _refuse(f"{name}, bits of element {start}", bits, advice)  # NaN has several bit patterns


def _crc(value: object) -> int:
    return zlib.crc32(repr(value).encode())


def _halves_of_digest(flat: Tensor) -> list[float]:
    """The digest in two numbers that float64 has exactly."""
    return list(divmod(_digests({"": flat})[""] % 2**64, 2**32))


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Digest of each tensor; one wait for the device."""
    if not tensors:
        return {}
    words = [_words(tensor.detach().contiguous().flatten()) for tensor in tensors.values()]
    longest, device = max(map(len, words)), words[0].device
    places = _numbers(0, min(longest, CHUNK), device)
    chunks = _numbers(CHUNK, 1 + longest // CHUNK, device)
    digests = torch.stack([_digest(each, places, chunks) for each in words])
    return dict(zip(tensors, digests.tolist(), strict=True))


def _digest(bits: Tensor, places: Tensor, chunks: Tensor) -> Tensor:
    """Sum of integers, each times the number of its place in a chunk and that of the chunk, modulo 2⁶⁴, int64 []."""
    sums = torch.stack([(chunk * places[: len(chunk)]).sum() for chunk in bits.split(CHUNK)])
    return (sums * chunks[: len(sums)]).sum()


def _numbers(first: int, count: int, device: torch.device) -> Tensor:
    """Odd numbers without a pattern, the same on every device, int64 [count]."""
    mixed = torch.arange(first, first + count, device=device) * ODD
    return (mixed ^ (mixed >> SHIFT)) * ODD | 1


def _words(flat: Tensor) -> Tensor:
    """Bits as integers; of 64 they are two, as the highest bits of an even number of products would cancel."""
    return flat.view(torch.int32 if flat.element_size() % 4 == 0 else _integers(flat))


def _integers(tensor: Tensor) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64)


def _refuse(name: str, column: Mapping[int, object], advice: str) -> NoReturn:
    ranks_of: dict[str, list[int]] = {}
    for rank, value in column.items():
        ranks_of.setdefault(repr(value), []).append(rank)
    parts = [f"{value} on {named_ranks(ranks)}" for value, ranks in ranks_of.items()]
    raise ConfigError(f"the ranks differ: {name} is {' and '.join(parts)}; {advice}")

"""Reduction of a step's amaxes over ranks, by one collective.

Ranks that close different steps must not mix their amaxes, nor hang in tensors of different lengths. So the tensor that
is reduced has a length that all ranks of the group know, and begins with a digest of the layers and of the number of
their step:

    float32 [length] = digest [4], n amaxes, n overflow marks, 0     if they are longer: a second reduce of the rest

The maximum of the digest is the rank's own on every rank, or on none: then all of them say what they have and raise.
Where they agree, they have the same n. The length is 4,096 at first, enough for 682 layers with three amaxes each, and
grows to what they have agreed on: a group has a second reduce in the first step of more layers, and never again.
"""

import weakref
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, distributed

from octavo.errors import ConfigError
from octavo.recipes import Recipe
from octavo.scaling.amax_history import EMPTY, AmaxHistory, ScaleUpdates
from octavo.scaling.operand_scaling import ROLES

__all__ = ["DelayedLayer", "default_group", "reduce_amaxes"]

_SHORTEST = 4096  # elements: as slow as one, on a network, and enough for most models
_agreed: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()  # by group, lengths above that
_ADVICE = (
    "train the same layers for the same number of steps on every rank, give convert the process group of the ranks "
    'that do, amax_group=group, or amax_group="rank" for each rank alone'
)


class DelayedLayer(Protocol):
    """A layer that may keep an amax history."""

    path: str
    experts: int | None
    in_features: int
    out_features: int
    scale_updates: ScaleUpdates
    amax_history: AmaxHistory | None
    last_recipe: Recipe | None

    @property
    def stored_weight(self) -> Tensor:
        """The parameter that holds the weight."""
        ...

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """As of ``torch.nn.Module``."""
        ...


def default_group() -> "distributed.ProcessGroup | None":
    """The default process group if it has more than one rank."""
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return distributed.group.WORLD
    return None


@torch.no_grad()
def reduce_amaxes(layers: Sequence[DelayedLayer], group: "distributed.ProcessGroup") -> None:
    """Raise the running step's amaxes and overflow marks to the largest of all ranks: nothing recorded is below 0.

    Raises:
        ConfigError: the ranks close other layers or another step, or a rank takes no part.
    """
    states = [None if layer.amax_history is None else layer.amax_history.running for layer in layers]
    if not any(states):
        return
    sizes = [len(ROLES) * (layer.experts or 1) for layer in layers]
    pending, overflowed = _reduced(_recorded(states, sizes), _described(layers), group).tensor_split(2)
    for index, new in enumerate((pending, overflowed > 0)):
        pairs = [(state[index], part) for state, part in zip(states, new.split(sizes), strict=True) if state]
        torch._foreach_copy_([old for old, _ in pairs], [part for _, part in pairs])


def _recorded(states: Sequence[tuple[Tensor, Tensor] | None], sizes: Sequence[int]) -> Tensor:
    """float32 [2 n]: n pending amaxes, then as many overflow marks; a layer without a history has none.

    Of all layers at once: a few small operations a layer take longer than the reduction.
    """
    device = next(state[0].device for state in states if state)
    pending, marks = [], []
    for state, size in zip(states, sizes, strict=True):
        if state is None:
            pending.append(torch.full((size,), EMPTY, dtype=torch.float32, device=device))
            marks.append(torch.zeros(size, dtype=torch.bool, device=device))
        elif state[0].device == device:
            pending.append(state[0])
            marks.append(state[1])
        else:
            pending.append(state[0].to(device))
            marks.append(state[1].to(device))
    return torch.cat([*pending, torch.cat(marks).float()])


def _described(layers: Sequence[DelayedLayer]) -> list[str]:
    """One line for each layer: properties that must be equal on all ranks."""
    return [
        f"step {layer.scale_updates.closed_steps + 1} of layer {layer.path!r}, {layer.in_features} to "
        f"{layer.out_features}{'' if layer.experts is None else f', {layer.experts} experts'}"
        for layer in layers
    ]


def _reduced(values: Tensor, described: list[str], group: Any) -> Tensor:
    """The ranks' maxima of ``values``, float32 [n], as the module's docstring lays them out."""
    crc = zlib.crc32("\n".join(described).encode())
    halves = torch.cat([values.new_full((1,), half) for half in (crc >> 16, crc & 0xFFFF)])  # exact in float32
    digest = torch.cat([halves, -halves])
    length = _agreed.get(group, _SHORTEST)
    first, remainder = values.tensor_split([length - len(digest)])
    padding = values.new_zeros(length - len(digest) - len(first))
    first = torch.cat([digest, first, padding])
    _all_reduce(first, described, group)
    capturing = first.is_cuda and torch.cuda.is_current_stream_capturing()  # nothing can be read then
    if not capturing and not torch.equal(first[: len(digest)], digest):
        _refuse_difference(described, group)
    if len(remainder):
        _all_reduce(remainder, described, group)
        if not capturing:  # nothing has been compared then
            _agreed[group] = len(digest) + len(values)
    return torch.cat([first[len(digest) : len(first) - len(padding)], remainder])


def _all_reduce(values: Tensor, described: list[str], group: Any) -> None:
    try:
        distributed.all_reduce(values, op=distributed.ReduceOp.MAX, group=group)
    except RuntimeError as error:  # torch has no class of its own for a rank that has ended
        raise ConfigError(
            f"rank {distributed.get_rank()} could not reduce its amaxes ({_summary(described)}) with the other ranks, "
            f"one of which has ended or waits elsewhere; {_ADVICE}"
        ) from error


def _refuse_difference(described: list[str], group: Any) -> NoReturn:
    """Name what differs between the group's first rank and the first that is unlike it; all ranks raise together."""
    by_rank: list[list[str]] = [[]] * distributed.get_world_size(group)
    distributed.all_gather_object(by_rank, described, group=group)
    ranks = distributed.get_process_group_ranks(group)
    other = next(index for index, theirs in enumerate(by_rank) if theirs != by_rank[0])
    texts = []
    for index, than in ((0, other), (other, 0)):
        only = list((Counter(by_rank[index]) - Counter(by_rank[than])).elements())
        text = f"rank {ranks[index]} closes {len(by_rank[index])} layers"
        texts.append(f"{text}, it alone {_summary(only)}" if only else text)
    raise ConfigError(f"the ranks' layers differ, or their steps: {'; '.join(texts)}; {_ADVICE}")


def _summary(described: list[str]) -> str:
    return "; ".join(described[:2]) + (f"; and {len(described) - 2} more" if len(described) > 2 else "")

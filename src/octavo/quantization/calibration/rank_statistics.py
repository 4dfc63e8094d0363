"""Statistics of several ranks, each of other batches, as if one process had seen all batches.

Ranks first tell each other what they have seen, so that one that failed stops all of them, with its own sentence. Then
one MAX all-reduce takes all amaxes and one SUM all-reduce all histograms. Both are exact in any order: the scales of
every method are those of one process, bit for bit. Mean keys are sums in float64, whose last bit depends on the order.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn

from octavo.errors import ConfigError, DataError
from octavo.kernels.tracing import is_distributed
from octavo.quantization.calibration.magnitude_histogram import MagnitudeCounts
from octavo.quantization.calibration.observers import InputStatistics, Observation

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["check_is_whole", "observed_by_ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """Report of a rank to the others.

    Attributes:
        failure: sentence of its error; empty if there is none.
        layers: paths of all layers that it observes.
        calls: number of calls and hash of the inputs' serial numbers, by path of a layer that it has called.
        positions: number of positions of keys, by index of a decoder layer.
        sizes: numbers of batches, samples and tokens.
    """

    failure: str = ""
    layers: tuple[str, ...] = ()
    calls: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    positions: dict[int, int] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()


def observed_by_ranks(
    observe: Callable[[], Observation], layers: Mapping[str, nn.Linear], group: "ProcessGroup"
) -> Observation:
    """Observe on each rank of a group, and return on all of them the statistics of all.

    Args:
        observe: observes this rank's batches.
        layers: the layers that it observes, by path; the same on all ranks.
        group: the ranks.

    Raises:
        DataError: another rank failed.
        ConfigError: the ranks observe different layers.
    """
    try:
        own = observe()
    except Exception as error:
        _gathered(_Seen(failure=str(error) or type(error).__name__), group)
        raise
    by_rank = _gathered(_seen(own, layers), group)
    ranks = distributed.get_process_group_ranks(group)
    for rank, each in zip(ranks, by_rank, strict=True):
        if each.failure:
            raise DataError(f"rank {rank} could not calibrate: {each.failure}")
        if each.layers != by_rank[0].layers or each.positions.keys() != by_rank[0].positions.keys():
            raise ConfigError(
                f"ranks {ranks[0]} and {rank} calibrate different layers; give all ranks the same model and options"
            )
    device = next(layer.weight.device for layer in layers.values())
    together = _together(own, by_rank, device)
    _reduce(together, device, group)
    return together


def check_is_whole(layers: Mapping[str, nn.Linear]) -> None:
    """Raise ConfigError if ranks divide the weight of one of the layers."""
    for path, layer in layers.items():
        if is_distributed(layer.weight):
            raise ConfigError(
                f"ranks divide the weight of layer {path!r}; calibrate the model before it is divided, on one rank, or "
                "with group= on ranks that have all of it"
            )


def _seen(own: Observation, layers: Mapping[str, nn.Linear]) -> _Seen:
    return _Seen(
        layers=tuple(layers),
        calls={path: (each.calls, each.serials_hash) for path, each in own.inputs.items()},
        positions={layer: each.positions for layer, each in own.keys_and_values.items()},
        sizes=(own.batches, own.samples, own.tokens),
    )


def _gathered(seen: _Seen, group: "ProcessGroup") -> list[_Seen]:
    by_rank: list[Any] = [None] * group.size()
    distributed.all_gather_object(by_rank, seen, group=group)
    return by_rank


def _together(own: Observation, by_rank: Sequence[_Seen], device: torch.device) -> Observation:
    """This rank's magnitudes with everything else of all ranks."""
    batches, samples, tokens = map(sum, zip(*(each.sizes for each in by_rank), strict=True))
    inputs = {}
    for path in dict.fromkeys(path for rank in by_rank for path in rank.calls):
        calls = [rank.calls.get(path, (0, b"")) for rank in by_rank]
        inputs[path] = InputStatistics(
            own.inputs[path].counts if path in own.inputs else MagnitudeCounts(device),
            calls=sum(number for number, _ in calls),
            serials_hash=hashlib.blake2b(repr(calls).encode(), digest_size=16).digest(),
        )
    for layer, each in own.keys_and_values.items():
        each.positions = sum(rank.positions[layer] for rank in by_rank)
    return Observation(
        inputs=inputs, keys_and_values=own.keys_and_values, batches=batches, samples=samples, tokens=tokens
    )


def _reduce(observation: Observation, device: torch.device, group: "ProcessGroup") -> None:
    """Replace amaxes by the ranks' largest, and histograms and sums of keys by their sums."""
    cached = [each for _, each in sorted(observation.keys_and_values.items())]
    counts = [each.counts for each in observation.inputs.values()]
    counts += [part for each in cached for part in (each.keys, each.values)]
    if not counts:
        return
    amaxes = torch.stack([each.amax.to(device) for each in counts])
    histograms = torch.stack([each.counts.to(device) for each in counts])
    distributed.all_reduce(amaxes, op=distributed.ReduceOp.MAX, group=group)
    distributed.all_reduce(histograms, group=group)
    for each, amax, histogram in zip(counts, amaxes, histograms, strict=True):
        each.amax, each.counts = amax, histogram
    if cached:
        sums = torch.stack([each.key_sum.to(device) for each in cached])
        distributed.all_reduce(sums, group=group)
        for layer, key_sum in zip(cached, sums, strict=True):
            layer.key_sum = key_sum

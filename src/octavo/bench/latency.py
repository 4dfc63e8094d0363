"""How long a language model takes for a pass, in each of the formats that are compared.

A pass reads B sequences of T tokens and gives the logits of all of them: the work of a prompt, or of a batch that is
scored. It is not generation, token by token from a cache. Formats are timed in turn (:mod:`octavo.bench.timing`),
because a machine that is shared or warms up would favour the one that runs in a calm moment.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from octavo.bench.timing import Clock, EventClock, interleaved, wall_clock

__all__ = ["BATCHES", "PassTime", "emulation_note", "pass_times"]

BATCHES = (1, 16)


class Reads(Protocol):
    """A model that can be timed."""

    def logits(self, tokens: Tensor) -> Tensor:
        """Token ids [B, T] → logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime:
    """The median pass of one format at one batch size.

    Attributes:
        name: of the format.
        batch: sequences of a pass.
        length: tokens of each.
        latency_ms: median over the rounds.
    """

    name: str
    batch: int
    length: int
    latency_ms: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a pass over its latency."""
        return 1e3 * self.batch * self.length / self.latency_ms


def pass_times(
    models: Mapping[str, Reads],
    tokens: Tensor,
    *,
    batches: Sequence[int] = BATCHES,
    rounds: int = 3,
    clock: Clock | None = None,
    advance: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[PassTime]:
    """Time every model at every batch size, interleaved, after one round that is not counted.

    Args:
        models: by name.
        tokens: ids [T] of the sequence that every place of the batch holds, on the models' device.
        batches: their sizes.
        rounds: passes of each that count.
        clock: times one pass; None is the wall's on a CPU, and a GPU's own.
        advance: called before each pass with (passes done, of all).
    """
    clock = clock or (EventClock() if tokens.device.type == "cuda" else wall_clock)
    total = len(batches) * len(models) * (rounds + 1)
    done = 0

    def counted(model: Reads, rows: Tensor) -> Callable[[], object]:
        def run() -> object:
            nonlocal done
            advance(done, total)
            done += 1
            return model.logits(rows)

        return run

    measured_times = []
    for batch in batches:
        rows = tokens.expand(batch, -1).contiguous()
        with torch.cuda.device_of(tokens):  # whose queue a GPU's clock looks at
            seconds = interleaved(
                {name: counted(model, rows) for name, model in models.items()}, rounds=rounds, clock=clock
            )
        measured_times += [
            PassTime(name=name, batch=batch, length=len(tokens), latency_ms=1e3 * statistics.median(times))
            for name, times in seconds.items()
        ]
    return measured_times


def emulation_note(device: torch.device) -> str:
    """A sentence on what times on this device say about FP8."""
    if device.type == "cuda":
        return "Times are of this GPU."
    return (
        "A CPU has no FP8 instructions: codes are decoded and multiplied as BF16 or FP32, so FP8 can only be slower "
        "here than what it is decoded to. These times say nothing about a GPU that multiplies FP8."
    )

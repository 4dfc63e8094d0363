"""Time of a forward pass of a language model in several formats.

A pass reads B sequences of T tokens and returns the logits of all of them, as for a prompt or a scored batch; it does
not generate. Formats are timed in turn (:mod:`octavo.bench.timing`), because the load and temperature of a machine
change during the measurement.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from octavo.bench.timing import Clock, EventClock, interleaved, wall_clock

__all__ = ["BATCHES", "PassTime", "pass_times", "passes_note"]

BATCHES = (1, 16)


class LogitsModel(Protocol):
    """Model that can be timed."""

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits of token ids [B, T]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime:
    """Median time of a pass of one format at one batch size.

    Attributes:
        name: name of the format.
        batch: sequences per pass.
        length: tokens per sequence.
        latency_ms: median over the rounds.
    """

    name: str
    batch: int
    length: int
    latency_ms: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a pass divided by its latency."""
        return 1e3 * self.batch * self.length / self.latency_ms


def pass_times(
    models: Mapping[str, LogitsModel],
    tokens: Tensor,
    *,
    batches: Sequence[int] = BATCHES,
    rounds: int = 3,
    clock: Clock | None = None,
    advance: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[PassTime]:
    """Time every model at every batch size, interleaved, after one untimed round.

    Args:
        models: models by name.
        tokens: ids [T] of the sequence that every row of the batch holds, on the models' device.
        batches: batch sizes.
        rounds: timed passes of each model and batch size.
        clock: times one pass; None is the wall clock on a CPU and CUDA events on a GPU.
        advance: called before each pass with (passes done, number of passes).
    """
    clock = clock or (EventClock() if tokens.device.type == "cuda" else wall_clock)
    total = len(batches) * len(models) * (rounds + 1)
    done = 0

    def counted(model: LogitsModel, rows: Tensor) -> Callable[[], object]:
        def run() -> object:
            nonlocal done
            advance(done, total)
            done += 1
            return model.logits(rows)

        return run

    measured_times = []
    for batch in batches:
        rows = tokens.expand(batch, -1).contiguous()
        with torch.cuda.device_of(tokens):  # the clock records events in this device's queue
            seconds = interleaved(
                {name: counted(model, rows) for name, model in models.items()}, rounds=rounds, clock=clock
            )
        measured_times += [
            PassTime(name=name, batch=batch, length=len(tokens), latency_ms=1e3 * statistics.median(times))
            for name, times in seconds.items()
        ]
    return measured_times


def passes_note(device: torch.device) -> str:
    """Sentence on how far times on this device apply to FP8."""
    if device.type == "cuda":
        return "These are times of this GPU."
    return (
        "A CPU has no FP8 instructions: codes are decoded and multiplied as BF16 or FP32, so FP8 can only be slower "
        "here than what it is decoded to. These times say nothing about a GPU that multiplies FP8."
    )

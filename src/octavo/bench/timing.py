"""Clocks, and variants timed in turn and compared round by round.

Machines are shared and noisy, and a GPU's clock follows its temperature, so nothing is timed alone: each round runs
every variant once, and the result is the median of the per-round ratios to one of them, with their quartiles.

A GPU kernel of 20 µs is faster than the Python that launches it. ``EventClock(lead=...)`` puts that many seconds of
idling into the queue before the first event, so that Python launches ahead, kernels follow each other, and the time
between the two events is theirs alone. Without a lead the launches count too: the time of a training step.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

__all__ = ["Clock", "EventClock", "Ratio", "interleaved", "ratio", "wall_clock"]

CYCLES_A_SECOND = 2.0e9  # a little above Hopper's clock: the lead is at least as long as requested

Clock = Callable[[Callable[[], object]], float]  # runs a function and returns the seconds it took
Run = TypeVar("Run", bound=Callable[[], object])


def wall_clock(run: Callable[[], object]) -> float:
    """Seconds on the wall."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


class EventClock:
    """Seconds between two events in the queue of the current CUDA device.

    Args:
        lead: seconds that the queue idles before the first event.
    """

    def __init__(self, lead: float = 0.0) -> None:
        self.cycles = int(lead * CYCLES_A_SECOND)

    def __call__(self, run: Callable[[], object]) -> float:
        """Run it on an idle device and wait."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        if self.cycles:
            torch.cuda._sleep(self.cycles)  # noqa: SLF001 (torch's own way to keep a queue busy)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def interleaved(
    variants: Mapping[str, Run],
    *,
    rounds: int,
    warmup: int = 1,
    clock: Callable[[Run], float] = wall_clock,
    is_late: Callable[[], bool] = lambda: False,
) -> dict[str, list[float]]:
    """Seconds of every variant in every round; a round runs each once, in turn.

    Args:
        variants: functions to run, by name.
        rounds: number of rounds; fewer, but at least three, once it is late.
        warmup: untimed rounds before them.
        clock: times one call.
        is_late: called after every round.
    """
    for _ in range(warmup):
        for run in variants.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    gc.disable()
    try:
        for index in range(rounds):
            if index >= 3 and is_late():
                break
            for name, run in variants.items():
                seconds[name].append(clock(run))
            gc.collect()
    finally:
        gc.enable()
    return seconds


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of the per-round ratios of two variants' times, and the quartiles around it."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


def ratio(seconds: Mapping[str, list[float]], name: str, base: str) -> Ratio:
    """Duration of ``name`` relative to ``base``, per round.

    Example:
        >>> print(ratio({"ours": [2.0, 2.0, 3.0], "other": [1.0, 1.0, 1.0]}, "ours", "other"))
        2.00 (2.00–3.00)
    """
    ratios = sorted(ours / other for ours, other in zip(seconds[name], seconds[base], strict=True))
    low, _, high = statistics.quantiles(ratios, n=4)
    return Ratio(statistics.median(ratios), low, high)

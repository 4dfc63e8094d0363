"""Contestants timed in turn, and compared round by round.

Machines are shared and noisy, and a GPU's clock follows its temperature, so nothing is timed alone: each round runs
every contestant once, and what counts is the median of the per-round ratios to one of them, with their quartiles.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["Clock", "Ratio", "interleaved", "never", "ratio", "wall_clock"]

Clock = Callable[[Callable[[], object]], float]  # runs something and says how many seconds it took
Run = TypeVar("Run", bound=Callable[[], object])


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of the per-round ratios of two contestants' times, and the quartiles around it."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


def wall_clock(run: Callable[[], object]) -> float:
    """Seconds on the wall."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def never() -> bool:
    """There is always time for another round."""
    return False


def interleaved(
    contestants: Mapping[str, Run],
    *,
    rounds: int,
    warmup: int = 1,
    clock: Callable[[Run], float] = wall_clock,
    late: Callable[[], bool] = never,
) -> dict[str, list[float]]:
    """Seconds of every contestant in every round; a round runs each once, in turn.

    Args:
        contestants: what to run, by name.
        rounds: how many; fewer, but three, where it becomes late.
        warmup: rounds before, which are not timed.
        clock: times one call.
        late: asked after every round.
    """
    for _ in range(warmup):
        for run in contestants.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    gc.disable()
    try:
        for done in range(rounds):
            if done >= 3 and late():
                break
            for name, run in contestants.items():
                seconds[name].append(clock(run))
            gc.collect()
    finally:
        gc.enable()
    return seconds


def ratio(seconds: Mapping[str, list[float]], name: str, base: str) -> Ratio:
    """How many times as long ``name`` takes as ``base``, round by round.

    Example:
        >>> print(ratio({"own": [2.0, 2.0, 3.0], "other": [1.0, 1.0, 1.0]}, "own", "other"))
        2.00 (2.00–3.00)
    """
    ratios = sorted(own / other for own, other in zip(seconds[name], seconds[base], strict=True))
    low, _, high = statistics.quantiles(ratios, n=4)
    return Ratio(statistics.median(ratios), low, high)

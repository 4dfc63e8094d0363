"""Counters of an engine, which only grow, for a server to report."""

from bisect import bisect_left
from dataclasses import dataclass, field

from octavo.inference.events import FinishReason

__all__ = ["EngineMetrics", "LatencyHistogram", "Load"]

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class LatencyHistogram:
    """Histogram of durations in seconds.

    Args:
        bounds: upper bounds of the bins, inclusive and ascending; a last bin counts larger values.

    Example:
        >>> latency = LatencyHistogram((0.1, 1.0))
        >>> latency.observe(0.1)
        >>> latency.observe(2.0)
        >>> latency.counts, latency.total, latency.count
        ([1, 0, 1], 2.1, 2)
    """

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """Number of counted values."""
        return sum(self.counts)


@dataclass(slots=True, kw_only=True)
class EngineMetrics:
    """Counters since the engine was created.

    Attributes:
        submitted: accepted requests.
        refused: requests refused because the queue was full.
        finished: requests that ended, by reason.
        prompt_tokens: prompt tokens of started requests.
        reused_tokens: of them, those whose keys and values were in the cache.
        answer_tokens: generated tokens.
        steps: calls of the model.
        rows: tokens read in all steps.
        cast_elements: elements of linear layers' inputs cast with a static scale.
        saturated_elements: of them, those that saturated.
        first_token_s: time from submission to the first token.
        token_s: time between tokens of an answer.
        answer_s: time from submission to the end.
    """

    submitted: int = 0
    refused: int = 0
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
    prompt_tokens: int = 0
    reused_tokens: int = 0
    answer_tokens: int = 0
    steps: int = 0
    rows: int = 0
    cast_elements: int = 0
    saturated_elements: int = 0
    first_token_s: LatencyHistogram = field(default_factory=LatencyHistogram)
    token_s: LatencyHistogram = field(default_factory=LatencyHistogram)
    answer_s: LatencyHistogram = field(default_factory=LatencyHistogram)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Current load of an engine.

    Attributes:
        waiting: requests in the queue.
        running: requests in the batch.
        pages: pages of the cache.
        pages_used: pages of running requests.
        pages_idle: unused pages that a prompt with the same beginning can reuse.
    """

    waiting: int
    running: int
    pages: int
    pages_used: int
    pages_idle: int

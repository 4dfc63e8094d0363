"""What an engine counts: plain numbers, which only grow, for a server to show."""

from bisect import bisect_left
from dataclasses import dataclass, field

from octavo.inference.requests import FinishReason

__all__ = ["EngineMetrics", "Histogram", "Load"]

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    """How often a number of seconds was at most each bound.

    Args:
        bounds: ascending; what is above the last is counted behind it.

    Example:
        >>> seen = Histogram((0.1, 1.0))
        >>> seen.observe(0.1)
        >>> seen.observe(2.0)
        >>> seen.counts, seen.total, seen.count
        ([1, 0, 1], 2.1, 2)
    """

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """Count one number."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """How many numbers were counted."""
        return sum(self.counts)


@dataclass(slots=True, kw_only=True)
class EngineMetrics:
    """Counters since the engine was made.

    Attributes:
        submitted: requests that were taken.
        refused: requests for which the queue was full.
        finished: those that are over, by why.
        prompt_tokens: of the requests that were started.
        reused_tokens: of them, those whose keys and values were there already.
        answer_tokens: that were told.
        steps: calls of the model.
        rows: tokens that were read in them.
        cast_elements: of inputs of linear layers, that met a static scale.
        saturated_elements: of them, those beyond it, which were clipped.
        first_token_s: from submission to the first token.
        token_s: from one token of an answer to the next.
        answer_s: from submission to the end.
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
    first_token_s: Histogram = field(default_factory=Histogram)
    token_s: Histogram = field(default_factory=Histogram)
    answer_s: Histogram = field(default_factory=Histogram)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy an engine is now.

    Attributes:
        waiting: requests in the queue.
        running: requests in the batch.
        pages: of the cache.
        pages_used: that belong to a request.
        pages_idle: that belong to none and may be reused for a prompt that begins alike.
    """

    waiting: int
    running: int
    pages: int
    pages_used: int
    pages_idle: int

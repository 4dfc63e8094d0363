"""Times of work on a GPU, between two events in its queue.

A kernel that takes 20 µs is faster than the Python that launches it. ``lead`` seconds of idling, put into the queue
before the first event, give Python that much time to launch ahead, so that kernels follow each other and the time
between the events is theirs alone. Without a lead the launches count too: what a training step costs.
"""

from collections.abc import Callable

import torch

__all__ = ["EventClock"]

CYCLES_A_SECOND = 2.0e9  # a little above Hopper's clock: the lead is at least as long as asked for


class EventClock:
    """Seconds on the current CUDA device.

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

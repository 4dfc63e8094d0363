"""Stopping on SIGINT and SIGTERM at the end of a step, with a checkpoint, instead of in the middle of one.

The first signal asks; the loop saves and ends. A second one ends at once, as it would have without this. A signal that
the process ignores (as after ``nohup``, or in a shell's background) stays ignored. Handlers can be set in the main
thread only; elsewhere nothing is caught.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["StopRequest", "StoppedBySignal", "stopping_on_signals"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)
LEFT_ALONE = (signal.SIG_IGN, None)  # None: a handler that Python did not set and could not put back


class StoppedBySignal(KeyboardInterrupt):
    """What was begun ended early, and whole, because a signal asked for it.

    Args:
        name: the signal's, such as "SIGTERM".
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.number = signal.Signals[name]


class StopRequest:
    """Whether, and by which signal, a stop was asked for."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    def __bool__(self) -> bool:
        return self.signal_name is not None


@contextmanager
def stopping_on_signals() -> Iterator[StopRequest]:
    """Catch the two signals inside the block; the handlers of before are put back after it."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    found = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: handler for number, handler in found.items() if handler not in LEFT_ALONE}

    def ask(number: int, _frame: FrameType | None) -> None:
        request.signal_name = signal.Signals(number).name
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, ask)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Graceful stop on SIGINT and SIGTERM: at the end of a step, with a checkpoint.

The first signal requests a stop; the loop saves and ends. A second one ends the process at once, by the previous
handler. A signal that the process ignores (as after ``nohup``, or in a shell's background) stays ignored. Outside of
the main thread, where Python cannot set handlers, no signal is caught.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["StopRequest", "StoppedBySignal", "stopping_on_signals"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)
LEFT_ALONE = (signal.SIG_IGN, None)  # None: a handler not set by Python, which cannot be restored


class StoppedBySignal(KeyboardInterrupt):
    """Work that a signal ended early, with nothing left incomplete.

    Args:
        name: name of the signal, such as "SIGTERM".
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.number = signal.Signals[name]


class StopRequest:
    """Flag of a requested stop, with the signal's name."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    def __bool__(self) -> bool:
        return self.signal_name is not None


@contextmanager
def stopping_on_signals() -> Iterator[StopRequest]:
    """Catch the two signals inside the block; restore the previous handlers after it."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: handler for number, handler in handlers.items() if handler not in LEFT_ALONE}

    def request_stop(number: int, _frame: FrameType | None) -> None:
        request.signal_name = signal.Signals(number).name
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, request_stop)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

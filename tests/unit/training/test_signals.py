"""Signals ask once, end the second time, and leave the handlers as they were."""

import os
import signal
import threading
from typing import Any

import pytest

from octavo.training.signals import stopping_on_signals

HANDLERS: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


@pytest.fixture(autouse=True)
def _handlers():
    """Python's own, whatever the tests were started under; a shell's background job ignores SIGINT."""
    before = {number: signal.signal(number, handler) for number, handler in HANDLERS.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_ignored_signal_stays_ignored(number):
    other = next(each for each in HANDLERS if each != number)
    signal.signal(number, signal.SIG_IGN)
    with stopping_on_signals() as stop:
        os.kill(os.getpid(), number)
        assert not stop
        os.kill(os.getpid(), other)
        assert stop.signal_name == other.name
        assert signal.getsignal(number) is signal.SIG_IGN
    assert signal.getsignal(number) is signal.SIG_IGN


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_requests_a_stop_and_handlers_are_restored(number):
    before = signal.getsignal(number)
    with stopping_on_signals() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop
        assert stop.signal_name == signal.Signals(number).name
    assert signal.getsignal(number) is before


def test_second_signal_ends_the_process_at_once():
    with stopping_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_signals_are_not_caught_in_another_thread():
    seen = []

    def work():
        with stopping_on_signals() as stop:
            seen.append((bool(stop), signal.getsignal(signal.SIGINT)))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, before)]

"""A rehearsal that compiles nothing: seconds instead of minutes, and the same code but for that."""

from collections.abc import Callable

import pytest

from octavo.bench import Session, rehearsal_session


@pytest.fixture
def session() -> Session:
    found = rehearsal_session()
    found.compiler = None
    return found


def ticking(seconds: float = 1.0) -> Callable[[], float]:
    """A clock's reading that moves on with every look."""
    now = 0.0

    def read() -> float:
        nonlocal now
        now += seconds
        return now

    return read

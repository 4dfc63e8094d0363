"""A rehearsal that compiles nothing: seconds instead of minutes, and the same code but for that."""

import gc
from collections.abc import Callable, Iterator

import pytest
from typer.testing import CliRunner, Result

from benchmarks.hopper.__main__ import app
from benchmarks.hopper.session import Session, rehearsal_session


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """All that tests before imported and left stays frozen: no collection looks through its million objects again.

    A comparison would thaw it together with what it has frozen itself, so it freezes nothing here. Nor is it thawed
    after a test: the rest of the suite has frozen its objects too.
    """
    gc.collect()
    gc.freeze()
    with monkeypatch.context() as frozen:
        frozen.setattr(gc, "freeze", lambda: None)
        frozen.setattr(gc, "unfreeze", lambda: None)
        yield freezing_session()


def freezing_session() -> Session:
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


@pytest.fixture
def hopper() -> Callable[..., Result]:
    """The command in this process."""

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="hopper")

    return run

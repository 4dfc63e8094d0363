"""Pieces of a run, each trained in a process of its own that knows nothing of the others.

The processes are forked from one that has imported what they need and done nothing else: starting Python and importing
torch and its compiler, which the optimiser asks for, would take each of them a hundred times as long as training.
"""

import multiprocessing
import os
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from octavo.text.tokens import TokenData, open_data
from octavo.training.loop import train
from tests.unit.training.tiny_runs import tiny_config

IMPORTED = ["torch._dynamo", "pytest", __name__]
PATIENCE = 120  # seconds, for a process that hangs


@dataclass(frozen=True, slots=True)
class Piece:
    """A process that trains, and what it says."""

    process: ForkServerProcess
    said: Connection

    def until(self, line: str) -> None:
        """Wait until it has said this."""
        while self.next_line() != line:
            pass

    def next_line(self) -> str:
        """What it says next."""
        assert self.said.poll(PATIENCE), "nothing is heard of it"
        line: str = self.said.recv()
        return line

    def send(self, number: int) -> None:
        """A signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def rest(self) -> tuple[int | None, list[str]]:
        """How it ends, and what it says until then."""
        lines = []
        try:
            while True:
                lines.append(self.next_line())
        except (EOFError, OSError):  # OSError: killed in the middle of a line
            self.process.join(PATIENCE)
        return self.process.exitcode, lines


def start(data: TokenData, run: Path, options: dict[str, Any], *, resume: bool, delay: float = 0.0) -> Piece:
    """Train, with so many seconds after each event.

    Args:
        data: to train on.
        run: its folder.
        options: of tiny_config.
        resume: go on with the run that is in the folder.
        delay: seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    how = {"resume": resume, "delay": delay}
    said, say = context.Pipe(duplex=False)
    process = context.Process(target=_train, args=(say, data.folder, run, options), kwargs=how)
    process.start()
    say.close()
    return Piece(process, said)


def _train(say: Connection, folder: Path, run: Path, options: dict[str, Any], *, resume: bool, delay: float) -> None:
    def on_event(event: object) -> None:
        say.send(f"{type(event).__name__} {getattr(event, 'step', '')}".strip())
        time.sleep(delay)

    try:
        result = train(tiny_config(**options), run, data=open_data(folder), resume=resume, on_event=on_event)
    except Exception:
        say.send(traceback.format_exc())
        raise
    say.send(f"{'interrupted' if result.interrupted else 'finished'} {result.step}")

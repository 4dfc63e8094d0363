"""Progress of long work on stderr: a live bar on a terminal, otherwise a line per tenth.

Work reports through callbacks (``advance(done, note)``). Only one live area exists: two would overwrite each other.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from octavo.cli.console import stderr
from octavo.cli.verbosity import is_quiet

__all__ = ["Advance", "Display", "open_display", "phases"]

QUIET_SECONDS = 2.0  # shorter phases print no percentages


class Advance(Protocol):
    """Callback that reports ``done`` of the phase's total; ``note`` is printed after the bar."""

    def __call__(self, done: float, note: str = "") -> None:
        """Move the phase to ``done``."""


class Display(Protocol):
    """Display of consecutive phases."""

    def phase(self, label: str, total: float | None) -> Advance:
        """Open the next phase; the one before it is complete."""

    def say(self, line: str) -> None:
        """Print a permanent line."""


@contextmanager
def open_display(*, quiet: bool = False) -> Iterator[Display]:
    """Open a live display if stderr is a terminal, otherwise one of plain lines; ``quiet`` or ``-q`` prints nothing."""
    console = stderr()
    console.quiet = quiet or is_quiet()
    if console.quiet or not console.is_terminal:
        display = PlainDisplay(console)
        yield display
        display.close()
        return
    columns = (
        TextColumn("{task.description:<28}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=console) as progress:
        display_live = LiveDisplay(progress)
        yield display_live
        display_live.close()


class LiveDisplay:
    """Progress bars of rich, one per phase."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.task: TaskID | None = None

    def phase(self, label: str, total: float | None) -> Advance:
        """Open the next phase; the one before it is complete."""
        self.close()
        task = self.progress.add_task(label, total=total, note="")
        self.task = task

        def advance(done: float, note: str = "") -> None:
            self.progress.update(task, completed=done, note=note)

        return advance

    def say(self, line: str) -> None:
        """Print a line above the bars."""
        self.progress.console.print(line, markup=False)

    def close(self) -> None:
        """Complete the open phase."""
        if self.task is None:
            return
        task = self.progress.tasks[self.task]
        total = task.total if task.total is not None else (task.completed or 1)
        self.progress.update(self.task, total=total, completed=total)
        self.task = None


class PlainDisplay:
    """Lines when a phase begins, at every tenth of a long one, and when it ends."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.label = ""
        self.started = 0.0

    def phase(self, label: str, total: float | None) -> Advance:
        """Open the next phase; the one before it is complete."""
        self.close()
        self.label, self.started = label, time.monotonic()
        self.say(f"{label} ...")
        shown = 0
        first: tuple[float, float] | None = (
            None  # (done, time) of the first report, which may include work of an earlier run
        )

        def advance(done: float, note: str = "") -> None:
            nonlocal shown, first
            if first is None and done:
                first = done, time.monotonic()
            tenth = int(10 * done / total) if total else 0
            if shown < tenth < 10 and time.monotonic() - self.started >= QUIET_SECONDS:
                shown = tenth
                self.say(f"{label}: {10 * tenth}%{_eta(first, done, total)}{', ' + note if note else ''}")

        return advance

    def say(self, line: str) -> None:
        """Print the line."""
        self.console.print(line, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Print the time that the open phase took."""
        if self.label:
            self.say(f"{self.label}: done in {time.monotonic() - self.started:.1f} s")
            self.label = ""


def _eta(first: tuple[float, float] | None, done: float, total: float | None) -> str:
    """Text of the time left, at the speed since the first report."""
    if not total or first is None or done <= first[0]:
        return ""
    seconds = (time.monotonic() - first[1]) / (done - first[0])
    return f", about {seconds * (total - done):.0f} s left"


def phases(display: Display) -> Callable[..., None]:
    """Return a callback (name, done, total, note="") that opens a phase whenever the name changes."""
    current = ""
    advance: Advance | None = None

    def show(name: str, done: float, total: float, note: str = "") -> None:
        nonlocal current, advance
        if name != current or advance is None:
            current, advance = name, display.phase(name, total)
        advance(done, note)

    return show

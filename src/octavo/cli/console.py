"""Printing for all commands: tables, JSON, and error messages on stderr.

stdout carries results only, so that ``octavo … --json | jq`` works; progress and errors go to stderr.
"""

import errno
import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

__all__ = [
    "Terminated",
    "complain",
    "finite",
    "number",
    "print_json",
    "print_lines",
    "print_table",
    "sentence_of",
    "stderr",
    "stdout",
]

PIPE_WIDTH = 120  # columns when the output is not a terminal, whose width is unknown


def _console(*, to_stderr: bool) -> Console:
    stream = sys.stderr if to_stderr else sys.stdout  # None if the shell has closed it, as by >&-
    is_terminal = stream is not None and stream.isatty()
    return Console(stderr=to_stderr, width=None if is_terminal else PIPE_WIDTH, highlight=False)


class Terminated(BaseException):
    """SIGTERM, raised in the main thread; not an Exception, like KeyboardInterrupt."""


def stdout() -> Console:
    """The console of results."""
    return _console(to_stderr=False)


def stderr() -> Console:
    """The console of progress and errors."""
    return _console(to_stderr=True)


def complain(sentence: str) -> None:
    """Print an error message of one sentence."""
    stderr().print(f"[bold red]error:[/] {escape(sentence)}", soft_wrap=True)


def sentence_of(error: OSError) -> str:
    """Convert an error of the operating system to one sentence."""
    reason = (error.strerror or str(error)).lower()
    place = f" {os.fsdecode(error.filename)}" if error.filename else " a file"
    advice = {
        errno.ENOSPC: "free some space or choose another disk; existing files are unchanged",
        errno.EACCES: "choose a path you may read and write",
        errno.EPERM: "choose a path you may read and write",
        errno.EROFS: "choose a path you may read and write",
    }
    hint = advice.get(error.errno or 0)
    return f"cannot use{place}: {reason}" + (f"; {hint}" if hint else "")


def print_lines(*lines: str, to_stderr: bool = False) -> None:
    """Print lines without wrapping them; brackets are not interpreted."""
    for line in lines:
        _console(to_stderr=to_stderr).print(line, markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print ``value`` as JSON; NaN and Inf become null."""
    sys.stdout.write(json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, whole: int = 0
) -> None:
    """Print a table, the first ``left`` columns aligned left, the others right; brackets are not interpreted.

    Cells of the first ``whole`` columns are not folded.
    """
    rows = list(rows)
    table = Table(
        title=Text(title, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for index, name in enumerate(columns):
        width = max(len(row[index]) for row in rows) if rows and index < whole else None
        justify: Literal["left", "right"] = "left" if index < left else "right"
        table.add_column(Text(name), justify=justify, overflow="fold", min_width=width)
    for row in rows:
        table.add_row(*map(Text, row))
    stdout().print(table)


def number(value: float | None, digits: int = 4) -> str:
    """Format a number with ``digits`` significant digits and thousands separators; ``–`` for None.

    Example:
        >>> number(1234567), number(0.0019531), number(None)
        ('1,234,567', '0.001953', '–')
    """
    if value is None:
        return "–"
    if float(value).is_integer() and abs(value) < 1e12:
        return f"{int(value):,}"
    return f"{value:,.{digits}g}"


def finite(value: Any) -> Any:
    """A value for JSON, in which NaN and Inf become None."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value

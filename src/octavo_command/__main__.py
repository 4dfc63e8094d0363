"""The ``octavo`` script, outside the package ``octavo``, whose import takes seconds, in which Ctrl-C may come."""

import os
import signal
import sys
from types import FrameType

__all__ = ["main"]


def main() -> None:
    """Answer Ctrl-C in a sentence while octavo is imported, and then run its command line, which answers it itself."""
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_usual:
        signal.signal(signal.SIGINT, _end)
    from octavo.cli.app import main as run

    if is_usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _end(number: int, _frame: FrameType | None) -> None:
    """End at once: nothing was begun, and a library whose import is broken off would make another error of it."""
    sys.stderr.write("error: interrupted before anything was begun\n")
    sys.stderr.flush()
    os._exit(128 + number)


if __name__ == "__main__":
    main()

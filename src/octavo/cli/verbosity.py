"""Choice of what a command prints besides its results: ``-v`` and ``-q``.

|            | octavo's log records | other libraries' | Python warnings | progress |
|------------|----------------------|------------------|-----------------|----------|
| ``-v``     | INFO and above       | INFO and above   | shown           | shown    |
| (neither)  | WARNING and above    | WARNING          | shown           | shown    |
| ``-q``     | ERROR and above      | ERROR            | hidden          | hidden   |

The package itself configures no logging; only the command line does, for as long as a command runs.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

__all__ = ["Verbosity", "is_quiet", "logging_to_stderr"]


class Verbosity(IntEnum):
    """Lowest level of the log records that are printed."""

    VERBOSE = logging.INFO
    NORMAL = logging.WARNING
    QUIET = logging.ERROR


def is_quiet() -> bool:
    """Return True under ``-q``."""
    return not logging.getLogger("octavo").isEnabledFor(logging.WARNING)


@contextmanager
def logging_to_stderr(verbosity: Verbosity) -> Iterator[None]:
    """Print log records of at least this level to stderr in the block."""
    root, handler = logging.getLogger(), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    level_before = root.level
    root.setLevel(verbosity)
    root.addHandler(handler)
    try:
        with warnings.catch_warnings():
            if verbosity == Verbosity.QUIET:
                warnings.simplefilter("ignore")
            yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level_before)

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


# transformers imports torchao, which warns of extensions for other machines and of an interface of torch's.
OF_IMPORTS = ("torchao", "torch.utils._pytree")


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
    """Print log records of at least this level to stderr in the block, each once.

    A library with a handler of its own, such as huggingface_hub, prints its records itself. Warnings of imports that
    concern no user of octavo are shown only if records of information are.
    """
    root, handler = logging.getLogger(), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    handler.addFilter(lambda record: not _is_handled_below_root(record.name))
    level_before, disabled_before = root.level, root.manager.disable
    root.setLevel(verbosity)
    root.addHandler(handler)
    if verbosity == Verbosity.QUIET:
        logging.disable(logging.WARNING)
    of_imports = {logger: logger.level for logger in map(logging.getLogger, OF_IMPORTS)}
    for logger in of_imports if verbosity > Verbosity.VERBOSE else ():
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            if verbosity == Verbosity.QUIET:
                warnings.simplefilter("ignore")
            yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level_before)
        for logger, level in of_imports.items():
            logger.setLevel(level)
        logging.disable(disabled_before)


def _is_handled_below_root(name: str) -> bool:
    """Return True if a handler prints records of the logger before they reach the root."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None and logger.parent is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers):
            return True
        logger = logger.parent
    return False

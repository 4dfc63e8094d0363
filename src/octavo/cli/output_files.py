"""Checks of output files before a command computes anything."""

from pathlib import Path

from octavo.errors import ConfigError
from octavo.files import check_may_write

__all__ = ["check_target"]


def check_target(option: str, path: Path) -> None:
    """Check that a file can be written.

    Args:
        option: the option that named it, such as "--out".
        path: the file; it may exist already.

    Raises:
        ConfigError: the path is a folder, or its parent folder is missing or not writable.
    """
    folder = path.parent
    if path.is_dir():
        raise ConfigError(f"{option}: {str(path)!r} is a folder; name a file")
    if not folder.is_dir():
        raise ConfigError(f"{option}: there is no folder {str(folder)!r}; create it first")
    check_may_write(folder)

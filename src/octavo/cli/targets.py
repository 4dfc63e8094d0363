"""Files that a command is asked to write: refused before anything is computed, by the name that was given."""

from pathlib import Path

from octavo.errors import ConfigError
from octavo.files import check_may_write

__all__ = ["check_target"]


def check_target(option: str, path: Path) -> None:
    """Refuse a file that cannot be written.

    Args:
        option: that names it, such as "--out".
        path: of the file; it may be there already.

    Raises:
        ConfigError: it is a folder, its folder is not there, or nobody may write into that.
    """
    folder = path.parent
    if path.is_dir():
        raise ConfigError(f"{option}: {str(path)!r} is a folder; name a file")
    if not folder.is_dir():
        raise ConfigError(f"{option}: there is no folder {str(folder)!r}; make it first")
    check_may_write(folder)

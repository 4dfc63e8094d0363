"""Files and folders that are whole or not there: write beside the target, fsync, rename.

A rename within a folder is atomic on POSIX; the fsync before it makes sure that the name never points at data that a
power cut loses, and the fsync of the folder after it makes the name itself durable.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from octavo.errors import ConfigError

__all__ = [
    "claimed_folder",
    "remove_if_empty",
    "replacing",
    "replacing_folder",
    "sync_file",
    "sync_folder",
    "write_atomically",
]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path to write to; it takes the place of ``path`` when the block ends, and is removed when it fails.

    What the system refuses about the temporary file is said of ``path``: nobody has named the other.

    Example:
        >>> with replacing(Path("table.bin")) as temporary:  # doctest: +SKIP
        ...     temporary.write_bytes(b"…")
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync_file(temporary)
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):  # such as of a folder that is a file: the first error says more
            temporary.unlink()
        if isinstance(error, OSError) and error.filename == str(temporary):
            error.filename, error.filename2 = str(path), None
        raise


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder to fill; it becomes ``folder`` when the block ends, and is removed when it fails.

    ``folder`` must not be there, or be empty (:func:`claimed_folder` makes sure of it beforehand).
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.writing")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in temporary.iterdir():
            sync_file(path)
        sync_folder(temporary)
        temporary.replace(folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def claimed_folder(folder: Path) -> Iterator[None]:
    """Make sure that the folder can be written before hours of work; an empty one that is left over is removed.

    Raises:
        ConfigError: something is there already.
    """
    if folder.is_symlink() or (folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))):
        raise ConfigError(f"{str(folder)!r} is not empty; name a new folder, or remove it first")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):
            remove_if_empty(folder)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write the whole of a small file."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def remove_if_empty(folder: Path) -> None:
    """Remove a folder that is there and holds nothing."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def sync_file(path: Path) -> None:
    """Wait until the file's bytes are on the disk."""
    _sync(path, os.O_RDONLY)


def sync_folder(path: Path) -> None:
    """Wait until the folder's names are on the disk."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Atomic writing of files and folders: write beside the target, fsync, rename.

A rename within a folder is atomic on POSIX. The fsync before it ensures that the new name never refers to data that a
power cut loses; the fsync of the folder after it makes the name durable.
"""

import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from octavo.errors import ConfigError, OctavoError

__all__ = [
    "check_folder",
    "check_may_write",
    "check_room",
    "claimed_folder",
    "disk_errors",
    "hidden_path",
    "remove_if_empty",
    "remove_leftovers",
    "replacing",
    "replacing_folder",
    "sync",
    "write_atomically",
]

OLDER, FILE = "older", "tmp"
KINDS = (FILE, "writing", OLDER, "data", "probe")  # of hidden folders, and of hidden files the first
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
IsOwn = Callable[[Path], bool]
TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)  # errors of renaming a folder to a name in use


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file to write to; it replaces ``path`` when the block ends, and is removed if the block fails.

    Errors of the operating system about the temporary file name ``path`` instead.

    Example:
        >>> with replacing(Path("table.bin")) as temporary:  # doctest: +SKIP
        ...     temporary.write_bytes(b"…")
    """
    with hidden_path(path, FILE) as temporary:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)


@contextmanager
def replacing_folder(folder: Path, *, is_own: IsOwn = lambda _: False) -> Iterator[Path]:
    """Yield a temporary folder to fill; it becomes ``folder`` when the block ends, and is removed if the block fails.

    ``folder`` must be missing or empty, or an older result (``is_own``); :func:`check_folder` checks this beforehand.
    An older result is moved aside, and removed after the rename: POSIX renames no folder onto one with content. A power
    cut between the two renames leaves both complete under hidden names; the next call restores the older one.

    Raises:
        ConfigError: ``folder`` holds something else, perhaps written by another process in the meantime.
    """
    folder = folder.resolve()
    with hidden_path(folder, "writing") as temporary:
        yield temporary
        _make_durable(temporary)
        if not (folder.is_dir() and is_own(folder)):
            _put_in_place(temporary, folder)
            return
        older = hidden_beside(folder, OLDER)
        with _locked(folder):
            folder.replace(older)
            try:
                _put_in_place(temporary, folder)
            except BaseException:
                if not folder.exists():
                    older.replace(folder)
                raise
            shutil.rmtree(older, ignore_errors=True)


@contextmanager
def hidden_path(path: Path, kind: str) -> Iterator[Path]:
    """Yield a new hidden folder (a file for the kind "tmp") beside ``path``, which is removed when the block ends.

    It is locked while the block runs. A killed process leaves it unlocked, and the next call removes it. Errors about
    it name ``path`` instead.
    """
    remove_leftovers(path.parent, re.escape(path.name))
    with ExitStack() as stack:
        while True:
            temporary = hidden_beside(path, kind)
            _make(temporary, kind, path)
            stack.callback(_remove, temporary)
            if stack.enter_context(_locked(temporary)) is not False:  # else another process removed it as a leftover
                break
        try:
            yield temporary
        except (OSError, OctavoError) as error:
            _rename_in_error(path, temporary, error)
            raise


def _make(temporary: Path, kind: str, path: Path) -> None:
    if kind != FILE:
        temporary.mkdir(parents=True)
        return
    try:
        temporary.touch(exist_ok=False)
    except OSError as error:
        _rename_in_error(path, temporary, error)
        raise


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def remove_leftovers(folder: Path, name: str = ".+") -> None:
    """Remove the hidden files and folders of killed processes from ``folder``; those of running ones are locked.

    If a process was killed while a folder was moved aside, that folder gets its name back. On a file system without
    locks nothing is removed.

    Args:
        folder: folder that holds them.
        name: regular expression of their final names.
    """
    hidden = re.compile(rf"\.({name})\.[0-9a-f]{{16}}\.({'|'.join(KINDS)})")
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        match = hidden.fullmatch(path.name)
        if match is None or path.is_symlink() or not (path.is_file() if match[2] == FILE else path.is_dir()):
            continue
        with _locked(path) as is_leftover:
            final = path.with_name(match[1])
            if is_leftover and match[2] == OLDER and not final.exists():
                path.replace(final)
            elif is_leftover:
                _remove(path)


@contextmanager
def _locked(path: Path) -> Iterator[bool | None]:
    """Lock a file or folder; yield False if it is locked or missing, None if the file system has no locks."""
    with ExitStack() as stack:
        yield _try_lock(path, stack)


def _try_lock(path: Path, stack: ExitStack) -> bool | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return path.exists()  # the previous holder of the lock may have removed it


def _rename_in_error(path: Path, temporary: Path, error: Exception) -> None:
    """Make an error name ``path`` instead of the temporary file, and a full disk's error, which names no file."""

    def renamed(value: object) -> object:
        is_name = isinstance(value, str | Path)
        return str(value).replace(str(temporary), str(path)) if is_name else value

    error.args = tuple(map(renamed, error.args))
    if not isinstance(error, OSError):
        return
    if error.filename is not None:  # assigning None would print "None" as a name
        error.filename = renamed(error.filename)
        if error.filename2 == str(path):  # a rename names both
            error.filename2 = None
    elif error.errno in FULL:  # a failed write names no file
        error.filename = str(path)


def hidden_beside(path: Path, kind: str) -> Path:
    """Return a unique hidden name beside ``path``, random rather than by process id, which containers may share.

    Example:
        >>> name = hidden_beside(Path("runs/mine"), "writing").name
        >>> name.startswith(".mine."), name.endswith(".writing")
        (True, True)
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.{kind}")


def _make_durable(folder: Path) -> None:
    """Write a folder's content to the disk, with the read permissions that the umask allows."""
    readers = folder.stat().st_mode & 0o666  # safetensors creates files that only their owner can read
    for path in (folder, *folder.rglob("*")):
        if not path.is_dir():
            path.chmod(path.stat().st_mode | readers)
        sync(path)


def _put_in_place(temporary: Path, folder: Path) -> None:
    try:
        temporary.replace(folder)
    except OSError as error:
        if error.errno not in TAKEN:
            raise
        raise ConfigError(
            f"{str(folder)!r} is taken: something else was written there in the meantime and is unchanged; name a new "
            "folder"
        ) from error
    sync(folder.parent)


@contextmanager
def claimed_folder(folder: Path) -> Iterator[None]:
    """Create a folder, to check that it can be written before hours of work; remove it afterwards if it is empty.

    Parent folders that were created for it are removed too.

    Raises:
        ConfigError: the path exists already, or is not writable.
    """
    check_folder(folder)
    check_may_write(folder.absolute().parent)
    resolved = folder.resolve()
    remove_leftovers(resolved.parent, re.escape(resolved.name))
    created = [place for place in (folder, *folder.absolute().parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for place in created:
            with suppress(OSError):
                remove_if_empty(place)


def check_folder(folder: Path, *, is_own: IsOwn = lambda _: False) -> None:
    """Check that a folder can take a result, before anything is computed.

    Args:
        folder: folder, which may be missing or empty.
        is_own: returns True for a folder that holds an older result of the same kind and nothing else.

    Raises:
        ConfigError: it is a file, holds something else, or is not writable.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not is_own(folder):
        raise ConfigError(f"{str(folder)!r} is not empty and holds other files; name a new folder, or remove it first")
    check_may_write(folder)


def check_may_write(folder: Path) -> None:
    """Check that a folder is writable or can be created.

    Raises:
        ConfigError: the folder, or its nearest existing parent, is a file or not writable.
    """
    above = _nearest(folder)
    if not above.is_dir():
        raise ConfigError(f"{str(above)!r} is a file; name a folder elsewhere")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"you may not write into {str(above)!r}; name a place elsewhere")


def _nearest(folder: Path) -> Path:
    """The folder, or its nearest existing parent."""
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def check_room(folder: Path, nbytes: int) -> None:
    """Check that a folder's disk has ``nbytes`` free, before hours of work.

    Raises:
        ConfigError: it has fewer.
    """
    above = _nearest(folder)
    free = shutil.disk_usage(above).free
    if free < nbytes:
        raise ConfigError(
            f"the disk of {str(folder)!r} has {free >> 20:,} MiB free, and the result takes {-(-nbytes >> 20):,} MiB; "
            "free some space, or name a folder on another disk"
        )


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a small file with :func:`replacing`."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Convert safetensors' errors about a disk, which hold the system's error number in their text, to OSError.

    Args:
        path: file to name in the error.
    """
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code), str(path)) from error


def remove_if_empty(folder: Path) -> None:
    """Remove a folder if it exists and is empty."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

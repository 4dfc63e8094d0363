"""Files and folders that are whole or not there: write beside the target, fsync, rename.

A rename within a folder is atomic on POSIX; the fsync before it makes sure that the name never points at data that a
power cut loses, and the fsync of the folder after it makes the name itself durable.
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
    "hidden_folder",
    "remove_if_empty",
    "remove_leftovers",
    "replacing",
    "replacing_folder",
    "sync_file",
    "sync_folder",
    "write_atomically",
]

OLDER, FILE = "older", "tmp"
KINDS = (FILE, "writing", OLDER, "data", "probe")  # of hidden folders, and of hidden files the first
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
IsOwn = Callable[[Path], bool]
TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)  # what a rename of a folder says of a name that is somebody's


def _is_nobodys(_: Path) -> bool:
    return False


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file to write to; it takes the place of ``path`` when the block ends, and is removed when it fails.

    The system's errors about the temporary file name ``path``, the only name that the caller gave.

    Example:
        >>> with replacing(Path("table.bin")) as temporary:  # doctest: +SKIP
        ...     temporary.write_bytes(b"…")
    """
    with _hidden(path, FILE) as temporary:
        yield temporary
        sync_file(temporary)
        temporary.replace(path)
        sync_folder(path.parent)


@contextmanager
def replacing_folder(folder: Path, *, is_own: IsOwn = _is_nobodys) -> Iterator[Path]:
    """A temporary folder to fill; it becomes ``folder`` when the block ends, and is removed when it fails.

    ``folder`` must not be there, be empty, or be ``is_own`` (:func:`check_folder` makes sure of it beforehand). An own
    one is moved aside, and removed when the new one has its name: POSIX renames no folder onto a full one. A power cut
    between those two renames leaves both, whole, under hidden names; the next call puts the older one back.

    Raises:
        ConfigError: ``folder`` is neither, perhaps since somebody else wrote it meanwhile.
    """
    folder = folder.resolve()
    with hidden_folder(folder, "writing") as temporary:
        yield temporary
        _make_durable(temporary)
        if not (folder.is_dir() and is_own(folder)):
            _put_in_place(temporary, folder)
            return
        older = hidden_beside(folder, OLDER)
        with _held(folder):
            folder.replace(older)
            try:
                _put_in_place(temporary, folder)
            except BaseException:
                if not folder.exists():
                    older.replace(folder)
                raise
            shutil.rmtree(older, ignore_errors=True)


@contextmanager
def hidden_folder(folder: Path, kind: str) -> Iterator[Path]:
    """A new folder beside ``folder``, hidden, removed when the block ends, whose errors are told of ``folder``.

    It is locked as long as the block runs. A killed process leaves it unlocked, and the next call removes it.
    """
    with _hidden(folder, kind) as temporary:
        yield temporary


@contextmanager
def _hidden(path: Path, kind: str) -> Iterator[Path]:
    """A new file (of kind ``FILE``) or folder, as :func:`hidden_folder` says."""
    remove_leftovers(path.parent, re.escape(path.name))
    with ExitStack() as stack:
        while True:
            temporary = hidden_beside(path, kind)
            _make(temporary, kind, path)
            stack.callback(_remove, temporary)
            if stack.enter_context(_held(temporary)) is not False:  # else a call beside this took it for a left-over
                break
        try:
            yield temporary
        except (OSError, OctavoError) as error:
            _tell_of(path, temporary, error)
            raise


def _make(temporary: Path, kind: str, path: Path) -> None:
    if kind != FILE:
        temporary.mkdir(parents=True)
        return
    try:
        temporary.touch(exist_ok=False)
    except OSError as error:
        _tell_of(path, temporary, error)
        raise


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def remove_leftovers(folder: Path, name: str = ".+") -> None:
    """Remove the hidden files and folders in ``folder`` of processes that were killed; those of living ones are locked.

    Where a process was killed in the moment when a folder had no name, the older one gets it back. A file system
    without locks keeps everything.

    Args:
        folder: where they are.
        name: regular expression of what they were to become.
    """
    hidden = re.compile(rf"\.({name})\.[0-9a-f]{{16}}\.({'|'.join(KINDS)})")
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        found = hidden.fullmatch(path.name)
        if found is None or path.is_symlink() or not (path.is_file() if found[2] == FILE else path.is_dir()):
            continue
        with _held(path) as is_left:
            place = path.with_name(found[1])
            if is_left and found[2] == OLDER and not place.exists():
                path.replace(place)
            elif is_left:
                _remove(path)


@contextmanager
def _held(path: Path) -> Iterator[bool | None]:
    """Lock a file or folder; False where another has it or it is gone, None where the file system has no locks."""
    with ExitStack() as stack:
        yield _locked(path, stack)


def _locked(path: Path, stack: ExitStack) -> bool | None:
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
    return path.exists()  # who had it before may have removed it


def _tell_of(path: Path, temporary: Path, error: Exception) -> None:
    """Make an error name ``path`` instead of the temporary file, also where a full disk's error names no file."""

    def told(value: object) -> object:
        is_name = isinstance(value, str | Path)
        return str(value).replace(str(temporary), str(path)) if is_name else value

    error.args = tuple(map(told, error.args))
    if not isinstance(error, OSError):
        return
    if error.filename is not None:  # a name that is set to None is said too
        error.filename = told(error.filename)
        if error.filename2 == str(path):  # a rename names both
            error.filename2 = None
    elif error.errno in FULL:  # a write that fails names nothing
        error.filename = str(path)


def hidden_beside(path: Path, kind: str) -> Path:
    """A unique name beside ``path``: no other thread has it, nor process 1 of another container.

    Example:
        >>> name = hidden_beside(Path("runs/mine"), "writing").name
        >>> name.startswith(".mine."), name.endswith(".writing")
        (True, True)
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.{kind}")


def _make_durable(folder: Path) -> None:
    """All of it readable to whom the umask lets read, and on the disk."""
    readers = folder.stat().st_mode & 0o666  # safetensors makes the file readable only for its owner
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            sync_folder(path)
        else:
            path.chmod(path.stat().st_mode | readers)
            sync_file(path)


def _put_in_place(temporary: Path, folder: Path) -> None:
    try:
        temporary.replace(folder)
    except OSError as error:
        if error.errno not in TAKEN:
            raise
        raise ConfigError(
            f"{str(folder)!r} is taken: something was put there before this was whole, and is left as it is; name "
            "a new folder"
        ) from error
    sync_folder(folder.parent)


@contextmanager
def claimed_folder(folder: Path) -> Iterator[None]:
    """Make sure that the folder can be written before hours of work; where it was made here and stays empty, it goes.

    With it go the folders above that were made for it.

    Raises:
        ConfigError: the path exists already, or is not writable.
    """
    check_folder(folder)
    check_may_write(folder.absolute().parent)
    resolved = folder.resolve()
    remove_leftovers(resolved.parent, re.escape(resolved.name))
    made = [place for place in (folder, *folder.absolute().parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for place in made:
            with suppress(OSError):
                remove_if_empty(place)


def check_folder(folder: Path, *, is_own: IsOwn = _is_nobodys) -> None:
    """Refuse a folder that cannot take a result, before anything is computed.

    Args:
        folder: may be missing or empty.
        is_own: whether a folder that is not empty holds nothing but an older result of the same kind.

    Raises:
        ConfigError: it is a file, holds something else, or is not writable.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not is_own(folder):
        raise ConfigError(f"{str(folder)!r} is not empty and holds other files; name a new folder, or remove it first")
    check_may_write(folder)


def check_may_write(folder: Path) -> None:
    """Refuse a folder that is not writable or cannot be created.

    Raises:
        ConfigError: it, or the nearest folder above it that is there, may not be written to.
    """
    above = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not above.is_dir():
        raise ConfigError(f"{str(above)!r} is a file; name a folder elsewhere")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"you may not write into {str(above)!r}; name a place elsewhere")


def check_room(folder: Path, nbytes: int) -> None:
    """Refuse a folder on whose disk so many bytes are not free, before hours of work.

    Raises:
        ConfigError: how many there are, and how many it takes.
    """
    above = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(above).free
    if free < nbytes:
        raise ConfigError(
            f"the disk of {str(folder)!r} has {free >> 20:,} MiB free, and the result takes {-(-nbytes >> 20):,} MiB; "
            "free some space, or name a folder on another disk"
        )


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write the whole of a small file."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what safetensors raises about a disk, with the system's number hidden in its text, into the OSError it is.

    Args:
        path: what it writes, which the error will name.
    """
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code), str(path)) from error


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

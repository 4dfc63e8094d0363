"""One case: a whole example, damaged, and read within bounds of memory and time."""

import hashlib
import json
import random
import resource
import shutil
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

from octavo.checksums import SUMS
from octavo.errors import OctavoError
from tests.fuzz.mutations import damaged, hostile_list
from tests.fuzz.readers import READERS

__all__ = ["ReaderError", "run_case"]

MORE_BYTES = 2 << 30  # than the process has when a case begins
SECONDS = 20
SEAL = "sha256"  # the key of octavo.checksums.sealed


class ReaderError(AssertionError):
    """Something else than octavo's errors has left a reader, or it took too long."""


def run_case(name: str, seed: int) -> bool:
    """Damage an example as the seed says, and read it; whether it was refused.

    Raises:
        ReaderError: see there; says how to repeat the case.
    """
    reader, rng = READERS[name], random.Random(f"{name} {seed}")
    with TemporaryDirectory(prefix="octavo-fuzz-") as temporary:
        folder = Path(temporary) / "case"
        shutil.copytree(_example(name), folder)
        files = sorted(path for path in folder.glob(reader.damage) if path.is_file() and path.name != SUMS)
        what = [_damaged(folder, rng.choice(files), rng) for _ in range(rng.choice((1, 1, 1, 2)))]
        try:
            with _bounded(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reader.read(folder)
        except (OctavoError, OSError):
            return True
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            how = f"python -m tests.fuzz --reader {name!r} --first {seed} --cases 1"
            raise ReaderError(
                f"{type(error).__name__} left {name!r} after {', '.join(what)}: {error}; {how}"
            ) from error
    return False


def _damaged(folder: Path, path: Path, rng: random.Random) -> str:
    """Damage a file; in three of four cases without the sums that would refuse it, to reach what reads it.

    Where there are sums, one time in ten it is their list that does harm.
    """
    lists = sorted(record for record in folder.rglob(SUMS) if not record.is_symlink())
    if lists and rng.random() < 0.1:
        return hostile_list(rng.choice(lists), rng)
    trusted = rng.random() < 0.75
    if trusted:
        for record in folder.rglob(SUMS):
            record.unlink()
        _put(folder, path, _unsealed(path))
    before = path.read_bytes()
    what = damaged(path, rng)
    if trusted:
        _put(folder, path, path.read_bytes(), before)
    return what


def _unsealed(path: Path) -> bytes:
    """The content of a JSON file, or of lines of it, without its key ``sha256``; of another file as it is."""
    content = path.read_bytes()
    if path.suffix not in {".json", ".jsonl"} or SEAL.encode() not in content:
        return content
    try:
        values = [json.loads(part) for part in ([content] if path.suffix == ".json" else content.splitlines())]
    except ValueError:  # damaged already
        return content
    for value in values:
        if isinstance(value, dict):
            value.pop(SEAL, None)
    return "\n".join(json.dumps(value) for value in values).encode()


def _put(folder: Path, path: Path, content: bytes, before: bytes | None = None) -> None:
    """Write a file, and its SHA-256 into the records that have the one of before."""
    old, new = (hashlib.sha256(x).hexdigest().encode() for x in (before or path.read_bytes(), content))
    path.write_bytes(content)
    for record in (*folder.rglob("*.json"), *folder.rglob("*.toml")):
        if old in (text := record.read_bytes()):
            record.write_bytes(text.replace(old, new))


@cache
def _example(name: str) -> Path:
    """A whole example, which its reader reads."""
    folder = Path(mkdtemp(prefix="octavo-fuzz-example-"))
    READERS[name].write(folder)
    READERS[name].read(folder)
    return folder


@contextmanager
def _bounded() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MORE_BYTES, hard))
    previous = signal.signal(signal.SIGALRM, _too_long)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class TooLongError(BaseException):
    """No reader turns it into an error of its own."""


def _too_long(*_: object) -> None:
    raise TooLongError(f"it takes more than {SECONDS} seconds")

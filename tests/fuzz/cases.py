"""One case: a whole example, damaged, and read within bounds of memory and time."""

import hashlib
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

from octavo.errors import OctavoError
from tests.fuzz.mutations import damaged
from tests.fuzz.readers import READERS

__all__ = ["ReaderError", "run_case"]

MORE_BYTES = 2 << 30  # than the process has when a case begins
SECONDS = 20


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
        files = sorted(path for path in folder.glob(reader.damage) if path.is_file())
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
    """Damage a file; in three of four cases the record that holds its SHA-256 is put right, to reach what reads it."""
    before = hashlib.sha256(path.read_bytes()).hexdigest().encode()
    what = damaged(path, rng)
    after = hashlib.sha256(path.read_bytes()).hexdigest().encode()
    if rng.random() < 0.75:
        for record in (*folder.rglob("*.json"), *folder.rglob("*.toml")):
            if before in (content := record.read_bytes()):
                record.write_bytes(content.replace(before, after))
    return what


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

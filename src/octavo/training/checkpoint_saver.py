"""Saves of a run's checkpoints, before the next step or while training goes on.

With ``async_checkpoints`` a save copies weights, moments and scaling state into the CPU's memory and returns; a thread
writes the copy. One save at a time: the next one, and the end of the run, wait for it and raise its error. The ranks'
threads agree in a process group of their own, beside the training's collectives.
"""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import distributed

from octavo.parallel.ranks import ALONE, Ranks
from octavo.training.checkpoint import Snapshot, write_checkpoint
from octavo.training.events import OnEvent, Saved

__all__ = ["CheckpointSaver"]


class CheckpointSaver:
    """Saves of one run. As a context, it ends with the last one complete.

    Args:
        run_dir: the run's folder.
        on_event: called with :class:`octavo.training.events.Saved` once a checkpoint is complete.
        keep_last: number of checkpoints to keep; 0 keeps all.
        is_async: return from a save before the files are written.
        ranks: all of them create a saver and save at the same steps.

    Attributes:
        newest: the newest complete checkpoint of this saver, or None.
    """

    def __init__(
        self, run_dir: Path, on_event: OnEvent, *, keep_last: int = 0, is_async: bool = False, ranks: Ranks = ALONE
    ) -> None:
        self._run_dir, self._emit, self._keep_last, self._ranks = run_dir, on_event, keep_last, ranks
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if is_async else None
        self._group: Any = distributed.new_group(backend="gloo") if is_async and ranks.size > 1 else None
        self._running: tuple[int, Future[Path]] | None = None
        self.newest: Path | None = None

    def save(self, snapshot: Snapshot) -> None:
        """Save, or begin to; weights may change afterwards.

        Raises:
            CheckpointError: this save failed, or the one before, which was still running.
        """
        if self._thread is None:
            self._saved(snapshot.step, self._write(snapshot))
            return
        self.wait()
        self._running = snapshot.step, self._thread.submit(self._write, snapshot.copied())

    def wait(self) -> None:
        """Wait for the running save, if there is one.

        Raises:
            CheckpointError: it failed.
        """
        if self._running is not None:
            (step, future), self._running = self._running, None
            self._saved(step, future.result())

    def __enter__(self) -> "CheckpointSaver":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.wait()
        elif self._running is not None:
            wait([self._running[1]])  # complete or not, the error that ends the run is the other one
        if self._thread is not None:
            self._thread.shutdown()

    def _write(self, snapshot: Snapshot) -> Path:
        return write_checkpoint(
            self._run_dir, snapshot, keep_last=self._keep_last, ranks=self._ranks, group=self._group
        )

    def _saved(self, step: int, path: Path) -> None:
        self.newest = path
        self._emit(Saved(step=step, path=path))

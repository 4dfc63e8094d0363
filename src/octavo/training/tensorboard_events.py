"""TensorBoard events of a run: an optional copy of its metrics.

TensorBoard writes in its own thread, reopens its file for each event, and raises the thread's errors, such as a missing
folder or a full disk, at a later call.
"""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

__all__ = ["TensorBoardEvents"]


class TensorBoardEvents:
    """Writer of events that stops at the first error, with one notice.

    Args:
        folder: folder of the event files.
        purge_step: TensorBoard hides what an earlier file has from this step on.
        on_notice: called with a message if events cannot be written.
    """

    def __init__(self, folder: Path, *, purge_step: int, on_notice: Callable[[str], None]) -> None:
        self._on_notice = on_notice
        self._writer: Any = None
        self._previous_hook = threading.excepthook
        self._own_threads: set[threading.Thread] = set()
        before = set(threading.enumerate())
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:
            on_notice("TensorBoard events are not written; install octavo[report] to get them")
            return
        try:
            self._writer = SummaryWriter(str(folder), purge_step=purge_step)
        except OSError as error:
            self._give_up(error)
            return
        self._own_threads = set(threading.enumerate()) - before
        threading.excepthook = self._hook

    @property
    def is_written(self) -> bool:
        """True while events are written."""
        return self._writer is not None

    def add(self, kind: str, step: int, values: dict[str, float]) -> None:
        """Add one event per number."""
        self._try(lambda writer: [writer.add_scalar(f"{kind}/{name}", x, step) for name, x in values.items()])

    def add_together(self, step: int, scalars: Iterable[tuple[str, float]]) -> None:
        """Add one event for all numbers."""
        self._try(lambda writer: writer._get_file_writer().add_summary(_summary(scalars), step))  # noqa: SLF001

    def close(self) -> None:
        """Write pending events and close the file."""
        self._try(lambda writer: (writer.flush(), writer.close()))
        threading.excepthook = self._previous_hook

    def _try(self, write: Callable[[Any], object]) -> None:
        if self._writer is None:
            return
        try:
            write(self._writer)
        except OSError as error:
            self._writer = None
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        reason = (error.strerror or str(error)).lower()
        self._on_notice(f"TensorBoard events are no longer written ({reason}); metrics.jsonl has every number")

    def _hook(self, args: Any) -> None:
        """Suppress tracebacks of the writer's thread, whose errors are raised again at the next event."""
        if args.thread not in self._own_threads:
            self._previous_hook(args)


def _summary(scalars: Iterable[tuple[str, float]]) -> Any:
    """Create TensorBoard's record of several numbers of one step."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    summary = Summary()
    add = summary.value.add
    for name, value in scalars:
        add(tag=name, simple_value=value)
    return summary

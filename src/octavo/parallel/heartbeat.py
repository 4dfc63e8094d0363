"""Where each rank is, for the sentence that ends a stalled collective.

A rank that hangs lets the others wait in a collective until torch's time-out, whose error names neither rank nor place.
Here a thread of each rank writes to the process group's store, once a second, what its main thread is doing: the loop's
phase, the layer, and the innermost line of Python outside of torch. No collective is added, and training waits for
nothing. A main thread that hangs still has its heartbeat; a process that is stopped leaves its last one.

Where a collective fails, the rank notes so at the store. Ranks that have not, a few seconds after a time-out, are those
that did not come.
"""

import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import distributed, nn

from octavo.errors import TrainingError
from octavo.parallel.ranks import Ranks, named_ranks

__all__ = ["Heartbeat", "lost_connection"]

# gloo raises a plain RuntimeError; that of its connections begins with the line of their source file. Ranks whose
# collectives differ in size violate a check of gloo instead, whose text begins otherwise.
GLOO_CONNECTION = re.compile(r"\[\S*gloo/transport/\S+:\d+\] ")
# In torch's DistBackendError, which is also that of a wrong use of NCCL.
NCCL_CONNECTION = ("ncclRemoteError", "communicator was aborted", "collective operation timeout", "store->get(")
TIMED_OUT, CLOSED = "timed out", "closed"
INTERVAL_S, POLL_S = 1.0, 0.05
PATIENCE_S = 3.0  # with ranks whose collective fails after this rank's
TORCH = str(Path(torch.__file__).parent)


class Heartbeat:
    """Account of where this rank is. As a context, it explains a stalled collective; a rank alone has none.

    Args:
        ranks: all of them have a heartbeat.
        layers: modules by name whose forward pass is noted.

    Raises:
        TrainingError: in place of torch's error about a time-out, with the ranks that did not come and where they are.
    """

    def __init__(self, ranks: Ranks, layers: Mapping[str, nn.Module]) -> None:
        self._ranks, self._layers = ranks, layers
        self._phase, self._layer = "the start", ""
        self._ends = threading.Event()
        self._hooks = ExitStack()
        self._main = threading.get_ident()

    def enter(self, phase: str) -> None:
        """Note what this rank does from now on."""
        self._phase, self._layer = phase, ""

    def __enter__(self) -> "Heartbeat":
        if self._ranks.size > 1:
            for name, layer in self._layers.items():
                # Before FSDP2's own hook, which gathers the layer's weights.
                hook = layer.register_forward_pre_hook(self._noting(name), prepend=True)
                self._hooks.callback(hook.remove)
            threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._ends.set()
        self._hooks.close()
        if self._ranks.size > 1 and (lost := lost_connection(error)):
            timed_out = any(word in str(lost).lower() for word in (TIMED_OUT, "timeout"))
            if sentence := self._explanation(how=TIMED_OUT if timed_out else CLOSED):
                raise TrainingError(sentence) from None  # raised from torch's error, it would read as a lost connection

    def _noting(self, name: str) -> Callable[[nn.Module, Any], None]:
        def note(_: nn.Module, __: Any) -> None:
            self._layer = f" of layer {name!r}"

        return note

    @property
    def _place(self) -> str:
        return self._phase + self._layer

    def _beat(self) -> None:
        store = _store()
        try:
            while True:
                store.set(f"place/{self._ranks.rank}", f"{self._place}{_line_of(self._main)}")
                if self._ends.wait(INTERVAL_S):
                    return
        except RuntimeError:
            return  # the store has ended, or its disk is full

    def _explanation(self, *, how: str) -> str | None:
        """Note that a collective has failed here; return which ranks did not come, if one has timed out."""
        store, others = _store(), range(self._ranks.size)
        try:
            store.set(f"failed/{self._ranks.rank}", f"{how}|{self._place}")
            failed: dict[int, tuple[str, str]] = {}
            waits_until = time.monotonic() + PATIENCE_S
            while len(failed) < len(others) and time.monotonic() < waits_until:
                time.sleep(POLL_S)
                failed = {rank: _split(value) for rank in others if (value := _value(store, f"failed/{rank}"))}
            missing = {rank: _value(store, f"place/{rank}") or "the start" for rank in others if rank not in failed}
        except RuntimeError:
            return None
        if not missing or all(each != TIMED_OUT for each, _ in failed.values()):
            return None
        waiting = {rank: place for rank, (_, place) in failed.items()}
        return (
            f"{named_ranks(list(missing))} did not come to a collective in which {_by_place(waiting, 'waited in')}, "
            f"until torch's time-out: {_by_place(missing, 'was last seen in')}; end what hangs there, and continue "
            "from the last checkpoint with --resume"
        )


def lost_connection(error: BaseException | None) -> BaseException | None:
    """Return torch's error about a lost connection or a time-out of ranks, if ``error`` is one or was raised from one.

    What is not surely one, such as another error of NCCL or of a data loader, is the rank's own failure.
    """
    while error is not None and not _is_of_connection(error):
        error = error.__cause__
    return error


def _is_of_connection(error: BaseException) -> bool:
    if isinstance(error, distributed.DistBackendError):
        return any(words in str(error) for words in NCCL_CONNECTION)
    if isinstance(error, distributed.DistError):  # of the store, or of the network
        return True
    return type(error) is RuntimeError and bool(GLOO_CONNECTION.search(str(error)))


def _store() -> Any:
    """The default process group's store; torch has no public name for it."""
    store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001
    return distributed.PrefixStore("octavo heartbeat", store)  # type: ignore[attr-defined]


def _value(store: Any, key: str) -> str:
    """A key's value, or nothing: a store waits for a key that is not there."""
    return store.get(key).decode() if store.check([key]) else ""


def _split(value: str) -> tuple[str, str]:
    how, _, place = value.partition("|")
    return how, place


def _by_place(places: Mapping[int, str], verb: str) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        ranks_of.setdefault(place, []).append(rank)
    return " and ".join(f"{named_ranks(ranks)} {verb} {place}" for place, ranks in ranks_of.items())


def _line_of(thread: int) -> str:
    """Innermost line of Python outside of torch, at which a thread is."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001 (documented in spite of its name)
    while frame is not None and frame.f_code.co_filename.startswith((TORCH, "<")):
        frame = frame.f_back
    if frame is None:
        return ""
    return f" ({frame.f_code.co_qualname}, {Path(frame.f_code.co_filename).name}:{frame.f_lineno})"

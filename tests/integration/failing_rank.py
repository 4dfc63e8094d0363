"""A rank of ``octavo`` that ends where it is told: ``torchrun … -m tests.integration.failing_rank train …``.

``FAULTS`` is JSON: a list of attempt, rank, place, step and kind. A place is a point of an update or of a save; a kind
is "kill", for SIGKILL, "late", for a rank that takes seconds longer, or "full", for a limit on the size of this rank's
files, which fails as a full disk does.
"""

import json
import os
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

from octavo.cli.app import main
from octavo.training import loop
from octavo.training.checkpoint_shards import _ShardWriter
from octavo.training.loop import Trainer

_faults = {
    (place, step): kind
    for attempt, rank, place, step, kind in json.loads(os.environ["FAULTS"])
    if (attempt, rank) == (int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"]))
}
_step = 0
LATE_S = 5


def reach(place: str, step: int = 0) -> None:
    """End here if that is the fault; in the running step by default."""
    kind = _faults.get((place, step or _step))
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "late":
        time.sleep(LATE_S)
    if kind == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))


def around(owner: Any, name: str, *, before: str = "", after: str = "") -> None:
    """Reach a place before or after each call of a function."""
    original: Callable[..., Any] = getattr(owner, name)

    def reaching(*arguments: Any, **options: Any) -> Any:
        reach(before)
        result = original(*arguments, **options)
        reach(after)
        return result

    setattr(owner, name, reaching)


def writing(writer: _ShardWriter, *arguments: Any) -> Any:
    """Fail before or after this rank's files of a checkpoint are written, perhaps while training goes on."""
    step = int(writer._target.name.removeprefix("step-"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    reach("before write", step)
    try:
        written = write_data(writer, *arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)  # torchrun has a file for the rank's error
    reach("after write", step)
    return written


def counting(trainer: Trainer) -> Any:
    """Note the step that begins."""
    global _step  # noqa: PLW0603
    _step = trainer.step + 1
    return gradients(trainer)


write_data = _ShardWriter.write_data
_ShardWriter.write_data = writing  # type: ignore[assignment,method-assign]
gradients = Trainer._gradients
Trainer._gradients = counting  # type: ignore[assignment,method-assign]
around(Trainer, "_batches", before="before forward")
around(loop, "token_loss", after="before backward")
around(Trainer, "_mean_loss", before="after backward")
around(Trainer, "_update", before="before update", after="after update")
around(Trainer, "_save", after="after save")

if __name__ == "__main__":
    main()

"""A run of two processes that train one model, each on batches of its own, with gloo between them."""

import multiprocessing
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import torch
from torch import distributed

from benchmarks.doctor_selftest.cases import SelftestCase, SelftestRun, Setting, run_case
from octavo.errors import TrainingError
from octavo.experiments.short_run import Start
from octavo.text.tokens import TokenData, open_data
from octavo.training.loop import Trainer

__all__ = ["RANKS", "run_on_ranks"]

RANKS = 2
TIMEOUT = timedelta(minutes=5)


def run_on_ranks(case: SelftestCase, setting: Setting, data: TokenData, start: Start) -> SelftestRun:
    """Run a case in two processes; what the first one saw.

    Raises:
        TrainingError: a process failed.
    """
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([__name__])  # imports torch once for all ranks of all runs
    with tempfile.TemporaryDirectory(prefix="octavo-") as name:
        folder = Path(name)
        torch.save({"step": start.step, "weights": start.weights, "optimizer": start.optimizer}, folder / "start.pt")
        room = (setting, str(data.folder), str(folder))
        ours, theirs = server.Pipe(duplex=False)
        processes = [server.Process(target=_rank, args=(rank, theirs, case, room)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        theirs.close()
        found: SelftestRun | None
        try:
            found = ours.recv()
        except EOFError:  # both ended without a word
            found = None
        for process in processes:
            process.join()
    if found is None or any(process.exitcode for process in processes):
        codes = [process.exitcode for process in processes]
        raise TrainingError(f"the processes of {case.name!r} ended with {codes}; what they printed says why")
    return found


def _rank(rank: int, found: Connection, case: SelftestCase, room: tuple[Setting, str, str]) -> None:
    setting, data, folder = room
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=TIMEOUT)
    try:
        start = Start(**torch.load(Path(folder) / "start.pt"))
        with _averaging_gradients():
            seen = run_case(case, setting, open_data(data), start, rank=rank)
        if rank == 0:
            found.send(seen)
    finally:
        distributed.destroy_process_group()


@contextmanager
def _averaging_gradients() -> Iterator[None]:
    """Every trainer's gradients are the mean of all ranks' before they are clipped."""
    genuine = Trainer._clip  # noqa: SLF001

    def clip(trainer: Trainer) -> float:
        for parameter in trainer.model.parameters():
            if parameter.grad is not None:
                distributed.all_reduce(parameter.grad)
                parameter.grad /= RANKS
        return genuine(trainer)

    with mock.patch.object(Trainer, "_clip", clip):
        yield

"""A rank that is killed, and two that continue: ``python -m tests.contract.killed_ranks_program FOLDER RANKS``.

Every attempt's ranks are forks of one process. tests/integration/test_ranks_launch.py has launchers that restart ranks.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import tokenizers  # noqa: F401 (imported once, for all forks)
import torch
import torch._dynamo
import torch.distributed.checkpoint
from torch import Tensor

from octavo.parallel import heartbeat
from octavo.parallel.heartbeat import lost_connection
from octavo.text.tokens import open_data
from octavo.training import loop
from octavo.training.checkpoint_shards import _ShardWriter
from octavo.training.config import RunConfig
from octavo.training.loop import Trainer, train
from tests.contract.rank_processes import _start_group, results_file
from tests.contract.training_ranks_program import config_of

KILL_STEP = 4
# By place, the rank that is killed, and among how many the weights are shared: DDP or FSDP2.
VICTIMS = {
    "forward": (1, 2),
    "before backward": (0, 2),
    "backward": (0, 1),
    "after backward": (1, 2),
    "optimizer": (1, 1),
    "before write": (1, 2),
    "after write": (0, 1),  # which completes a checkpoint once all ranks have written
}
LOST, OTHER = 3, 4  # exit codes: a collective broke; another error


def config(shard: int) -> RunConfig:
    """A run with a checkpoint before the step of the kill, and one after that step."""
    training: dict[str, Any] = {"steps": 6, "checkpoint_interval": 2, "eval_interval": 0, "statistics_interval": 0}
    return config_of(recipe="delayed", shard=shard, clip_norm=0.0, **training)


def kill(*_: object) -> None:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_backward(_: object, __: object, output: Tensor) -> None:
    output.register_hook(kill)


def prepare(trainer: Trainer, place: str) -> None:
    """Let the step that begins, or the save after it, end this process."""
    mlp = trainer.model.get_submodule("model.layers.0.mlp")
    if place == "forward":
        mlp.register_forward_pre_hook(kill)
    elif place == "before backward":
        mock.patch.object(loop, "token_loss", kill).start()  # of a micro-batch that has run forward
    elif place == "backward":
        mlp.register_forward_hook(kill_in_backward)
    elif place == "after backward":
        mock.patch.object(trainer, "_update", kill).start()
    elif place == "optimizer":
        trainer.optimizer.register_step_post_hook(kill)  # the weights are new, and the scales of the step before
    else:
        write = _ShardWriter.write_data

        def writing(*arguments: Any) -> None:
            if place == "after write":
                write(*arguments)
            kill()

        mock.patch.object(_ShardWriter, "write_data", writing).start()


def attempt(folder: Path, place: str, rank: int, *, kills: bool) -> None:
    """Train, or continue, on one rank."""
    (victim, shard), take = VICTIMS[place], Trainer.train_step
    _start_group(folder / f"store {place} {kills}", rank, 2)

    def taking(trainer: Trainer, log: Any) -> None:
        if kills and rank == victim and trainer.step == KILL_STEP - 1:
            prepare(trainer, place)
        take(trainer, log)

    with mock.patch.object(Trainer, "train_step", taking), mock.patch.object(heartbeat, "PATIENCE_S", 0.2):
        train(config(shard), folder / place, data=open_data(folder / "data"), resume=not kills)


def exit_codes(run: Callable[[int], None]) -> list[int]:
    """Exit codes of two ranks, each a fork."""
    children = []
    for rank in range(2):
        child = os.fork()
        if not child:
            code = OTHER
            try:
                run(rank)
                code = 0
            except BaseException as error:  # noqa: BLE001 (printed; the fork must not go on as its parent)
                code = LOST if lost_connection(error) else OTHER
                if code == OTHER:
                    traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main() -> None:
    """Save the exit codes of each place's two attempts."""
    folder, found = Path(sys.argv[1]), {}
    torch.set_num_threads(1)
    for place in VICTIMS:
        found[place] = [exit_codes(partial(attempt, folder, place, kills=kills)) for kills in (True, False)]
    torch.save(found, results_file(folder, 0, 1))


if __name__ == "__main__":
    main()

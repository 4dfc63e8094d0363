"""One of several ranks that train runs: ``python -m tests.contract.training_ranks_program FOLDER RANKS``.

A check is given the folder of the runs.
"""

import dataclasses
import json
import os
import resource
import signal
import threading
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from octavo.errors import OctavoError
from octavo.nn.tensor_parallel import whole
from octavo.parallel.data_parallel import copied_to_cpu
from octavo.parallel.ranks import Ranks
from octavo.parsing import read_tensors
from octavo.text.tokens import open_data
from octavo.training import checkpoint, checkpoint_shards, setup
from octavo.training.config import ParallelConfig, RunConfig
from octavo.training.evaluate import token_loss
from octavo.training.events import Saved, StepDone
from octavo.training.loop import Trainer, train
from octavo.training.loss_scaling import LossScaler
from octavo.training.setup import build_model
from tests.contract.rank_processes import Checks, Collectives, regrouped, run_ranks
from tests.unit.training.tiny_runs import tiny_config

RECIPES = ("fp32", "bf16", "tensorwise", "delayed", "rowwise", "blockwise", "mxfp8")
STEPS = 4
CHAIN_STEPS = 8
CHAIN: dict[str, Any] = {
    "recipe": "delayed", "grad_accumulation": 4, "steps": CHAIN_STEPS, "recipe_options": {"history_length": 3},
}  # fmt: skip


MOVED_RECIPES = ("delayed", "blockwise", "mxfp8")
SLICED: tuple[tuple[int, dict[str, Any]], ...] = (  # ranks and layouts that a state goes through
    (2, {"tensor": 2}), (2, {"shard": 2}), (2, {}), (4, {"shard": 4}), (2, {"tensor": 2}),
    (4, {"tensor": 2, "shard": 2}),
)  # fmt: skip
LAYOUTS_OF_FOUR: dict[str, dict[str, int]] = {"ddp": {}, "fsdp2": {"shard": 4}, "hsdp": {"shard": 2, "data": 2}}
TENSOR_LAYOUTS_OF_FOUR: dict[str, dict[str, Any]] = {
    "shards": {"shard": 2, "tensor": 2, "sequence": True},
    "replicas": {"data": 2, "tensor": 2},
}
TENSOR_RUNS = (("fp32", False), ("fp32", True), ("rowwise", True))  # recipe, and whether positions are divided


def config_of(
    *,
    shard: int = 1,
    data: int = 0,
    tensor: int = 1,
    sequence: bool = False,
    fp8_gradients: bool = False,
    check_interval: int = 1,
    **training: Any,
) -> RunConfig:
    """A tiny run of two micro-batches an update, evaluated in several forward passes."""
    settings = {"grad_accumulation": 2, "steps": STEPS, "eval_tokens": 0, "statistics_interval": 2, **training}
    parallel = ParallelConfig(
        shard=shard,
        data=data,
        tensor=tensor,
        sequence=sequence,
        fp8_gradients=fp8_gradients,
        check_interval=check_interval,
    )
    config = tiny_config(**settings)
    shape = dataclasses.replace(config.model, num_kv_heads=2)  # which two ranks can share
    return dataclasses.replace(config, model=shape, parallel=parallel)


def run(config: RunConfig, folder: Path, name: str, **options: Any) -> str:
    """Train and return the error's sentence, or nothing."""
    try:
        train(config, folder / name, data=open_data(folder / "data"), **options)
    except OctavoError as error:
        return str(error)
    return ""


def stopping(config: RunConfig, folder: Path, name: str, *, after: int, resume: bool) -> str:
    """Train until the first rank gets SIGTERM in a step."""

    def on_event(event: object) -> None:
        if isinstance(event, StepDone) and event.step == after and Ranks.current().is_first:
            os.kill(os.getpid(), signal.SIGTERM)

    return run(config, folder, name, resume=resume, on_event=on_event)


def every_recipe(folder: Path) -> list[str]:
    size = distributed.get_world_size()
    runs = [
        (recipe, shard, clip)
        for recipe in RECIPES
        for shard, clip in ((1, 1.0), (size, 0.0), (size, 1.0))[: 2 + (recipe == "delayed")]
    ]
    return [
        run(config_of(recipe=recipe, shard=shard, clip_norm=clip), folder, f"{recipe}-{shard}-{clip}-{size}")
        for recipe, shard, clip in runs
    ]


def four_ranks(folder: Path) -> list[str]:
    """A micro-batch for each rank, in three layouts; in two more, for each pair of ranks that share layers."""
    return [
        run(config_of(recipe="delayed", grad_accumulation=4, **sizes), folder, f"four {name}")
        for name, sizes in (LAYOUTS_OF_FOUR | TENSOR_LAYOUTS_OF_FOUR).items()
    ]


def tensor_parallel(folder: Path) -> list[str]:
    """Two ranks that share each layer; one run is cut and resumed by shards of FSDP2."""
    said = [
        run(config_of(tensor=2, recipe=recipe, sequence=sequence), folder, f"tensor {recipe} {sequence}")
        for recipe, sequence in TENSOR_RUNS
    ]
    cut, resumed = config_of(recipe="delayed", tensor=2), config_of(recipe="delayed", shard=2)
    said.append(stopping(cut, folder, "tensor to shards", after=2, resume=False))
    return [*said, run(resumed, folder, "tensor to shards", resume=True)]


def overflowing(folder: Path, name: str, *, shard: int = 1) -> str:
    """Train in FP16 with a loss scale that overflows until it has been halved often enough."""
    config = config_of(recipe="rowwise", precision="fp16", clip_norm=0.0, shard=shard)
    with mock.patch.object(setup, "LossScaler", partial(LossScaler, initial=2.0**40)):
        return run(config, folder, name)


def loss_scale(folder: Path) -> list[str]:
    return [overflowing(folder, f"fp16-{shard}", shard=shard) for shard in (1, 2)]


def fp8_gradients(folder: Path) -> list[str]:
    """A run, and what is said where a loss scale may change."""
    return [
        run(config_of(recipe="delayed", fp8_gradients=True), folder, "fp8 gradients"),
        run(config_of(recipe="rowwise", precision="fp16", fp8_gradients=True), folder, "fp8 gradients in fp16"),
    ]


def phases(folder: Path) -> str:
    schedule = (("bf16", 0.0), ("fp8", 0.5))
    return run(config_of(shard=2, recipe="delayed", precision_schedule=schedule, clip_norm=0.0), folder, "phases")


def interrupted(folder: Path) -> list[str]:
    """Runs of the same layout, cut and resumed."""
    said = []
    for shard in (1, 2):
        config, name = config_of(recipe="delayed", shard=shard), f"cut-{shard}"
        said += [stopping(config, folder, name, after=2, resume=False), run(config, folder, name, resume=True)]
    return said


def in_background(folder: Path) -> list[str]:
    return [written_late(folder, shard) for shard in (1, 2)]


def written_late(folder: Path, shard: int) -> str:
    """A run whose save of step 3 begins to write when step 4 is over."""
    stepped, write_data = threading.Event(), checkpoint_shards._ShardWriter.write_data

    def write(*arguments: Any) -> Any:
        assert stepped.wait(60)
        return write_data(*arguments)

    def on_event(event: object) -> None:
        if isinstance(event, StepDone) and event.step == STEPS:
            stepped.set()

    config = config_of(recipe="delayed", shard=shard, checkpoint_interval=3, async_checkpoints=True)
    with mock.patch.object(checkpoint_shards._ShardWriter, "write_data", write):
        return run(config, folder, f"background-{shard}", on_event=on_event)


def full_disk(folder: Path) -> list[str]:
    """A rank's disk is full after the first checkpoint, in sight of the next save or of the end.

    The second one's, by a limit on file size; then the first one's, which completes the checkpoint.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(event: object) -> None:
        if isinstance(event, Saved) and distributed.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))

    said = []
    for name, in_background in (("sync", False), ("async", True)):
        config = config_of(shard=2, checkpoint_interval=1, keep_checkpoints=0, async_checkpoints=in_background)
        said.append(run(config, folder, f"full {name}", on_event=fill))
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return [*said, full_for_state(folder)]


def full_for_state(folder: Path) -> str:
    """No space is left for the second checkpoint's state.json."""
    write_text, saved = Path.write_text, list[object]()

    def write(path: Path, *arguments: Any, **options: Any) -> int:
        return write_text(Path("/dev/full") if saved and path.name == "state.json" else path, *arguments, **options)

    def on_event(event: object) -> None:
        saved.extend([event] * isinstance(event, Saved))

    config = config_of(shard=2, checkpoint_interval=1, keep_checkpoints=0)
    with mock.patch.object(Path, "write_text", write):
        return run(config, folder, "full state", on_event=on_event)


def chain_of_two(folder: Path) -> str:
    return stopping(config_of(shard=2, **CHAIN), folder, "chain", after=4, resume=True)


def chain_of_four(folder: Path) -> str:
    return stopping(config_of(shard=2, data=2, **CHAIN), folder, "chain", after=6, resume=True)


def collectives(folder: Path) -> list[dict[str, int]]:
    """Number of collectives of an update of four micro-batches; DDP regroups its buckets in the second update."""
    counts, data = [], open_data(folder / "data")
    for shard in (1, 2):
        config = config_of(recipe="delayed", shard=shard, grad_accumulation=4, statistics_interval=0, check_interval=0)
        model, converted = build_model(config, data.vocab_size)
        options: dict[str, Any] = {"on_event": print, "converted": converted, "ranks": Ranks.current()}
        trainer = Trainer(config, folder / f"counted {shard}", model, data=data, **options)
        model.train()
        for _ in range(3):
            with Collectives() as counted:
                trainer._gradients()
                trainer._update()
                trainer.step += 1
        counts.append(dict(counted.counts))
    return counts


def resumed(config: RunConfig, folder: Path, name: str) -> Trainer:
    """A trainer that continues a run."""
    data = open_data(folder / "data")
    model, converted = build_model(config, data.vocab_size)
    trainer = Trainer(
        config,
        folder / name,
        model,
        data=data,
        on_event=lambda _: None,
        converted=converted,
        ranks=Ranks.current(tensor=config.parallel.tensor),
    )
    assert trainer.checkpoint is not None
    return trainer


def loaded(folder: Path) -> list[bool]:
    """Whether the ranks hold, whole, what a checkpoint of one process holds; in every layout."""
    size, equal = distributed.get_world_size(), []
    layouts: tuple[dict[str, Any], ...] = ({}, {"shard": size}, {"tensor": 2, "shard": size // 2})
    for sizes in layouts:
        trainer = resumed(config_of(recipe="delayed", grad_accumulation=4, **sizes), folder, "of one")
        assert trainer.checkpoint is not None
        for name, tensors in checkpoint._tensors_by_file(trainer.model, trainer.optimizer).items():
            stored = read_tensors(trainer.checkpoint / name)
            here = {key: whole(tensor.detach()) for key, tensor in tensors.items()}
            equal.append(stored.keys() == here.keys() and all(torch.equal(stored[key], here[key]) for key in stored))
    return equal


def uneven_shards(folder: Path) -> dict[str, int]:
    """Write tensors of fewer rows than ranks, and of no multiple; returns this rank's numbers of rows."""
    shards = {
        f"{name}{rows}": distribute_tensor(torch.arange(3 * rows).view(rows, 3), mesh, places, src_data_rank=None)
        for name, mesh, places in (
            ("fsdp", init_device_mesh("cpu", (4,)), [Shard(0)]),
            ("hsdp", init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(0)]),
            ("both", init_device_mesh("cpu", (2, 2)), [Shard(1), Shard(0)]),
        )
        for rows in (1, 2, 5, 7)
    }
    files = {"model.safetensors": {name: copied_to_cpu(shard) for name, shard in shards.items()}}
    describe = lambda temporary, sums: (temporary / "state.json").write_text(json.dumps(sums))  # noqa: E731
    checkpoint_shards.write_shards(folder / "uneven", files, describe, group=None)
    return {name: len(shard.to_local()) for name, shard in shards.items()}


def loss_after_move(folder: Path, recipe: str, shard: int) -> float:
    """Load a run's state on these ranks and save it again; returns the loss of a batch."""
    trainer = resumed(config_of(recipe=recipe, shard=shard, grad_accumulation=4), folder, f"moved {recipe}")
    save_again(trainer)
    trainer.model.eval()
    inputs, targets = trainer.data.batch(0, batch_size=2, context=16, seed=1)
    with torch.no_grad(), trainer.surroundings:
        return token_loss(trainer.forward(inputs), targets).item()


def save_again(trainer: Trainer) -> None:
    """Save the state that a trainer has loaded."""
    assert trainer.checkpoint is not None
    state = checkpoint.read_state(trainer.checkpoint)
    assert trainer.step == state.step == STEPS, "the data's position"
    trainer.saver.save(checkpoint.snapshot(state, model=trainer.model, optimizer=trainer.optimizer))


def moved(folder: Path) -> list[float]:
    """Runs of one process on two ranks, four, two again, in the layouts of each; then one through slices and shards."""
    rank, losses = distributed.get_rank(), []
    for number, (size, shards) in enumerate(((2, (1, 2)), (4, (2, 1)), (2, (1, 2)))):
        with regrouped(folder, f"move{number}", rank, size) as takes_part:
            for shard, recipe in product(shards, MOVED_RECIPES) if takes_part else ():
                losses.append(loss_after_move(folder, recipe, shard))
    for number, (size, sizes) in enumerate(SLICED):
        with regrouped(folder, f"slices{number}", rank, size) as takes_part:
            if takes_part:
                save_again(resumed(config_of(recipe="delayed", grad_accumulation=4, **sizes), folder, "sliced"))
    return losses


OF_TWO = (
    every_recipe,
    loss_scale,
    tensor_parallel,
    fp8_gradients,
    phases,
    interrupted,
    in_background,
    full_disk,
    collectives,
    loaded,
    chain_of_two,
)
OF_FOUR = (loaded, four_ranks, chain_of_four, uneven_shards, moved)


def checks(ranks: int) -> Checks:
    from tests.contract import training_ranks_faults as faults

    # The last one of each ends the process group.
    every = (*OF_TWO, *faults.OF_TWO) if ranks == 2 else (*faults.OF_FOUR, *OF_FOUR)
    return {check.__name__: partial(_in_folder, check) for check in every}


def _in_folder(check: Callable[[Path], Any], _rank: int, folder: Path) -> Any:
    return check(folder)


if __name__ == "__main__":
    run_ranks(checks)

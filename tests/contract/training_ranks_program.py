"""One of several ranks that train runs: ``python -m tests.contract.training_ranks_program FOLDER RANKS``.

A check is given the folder of the runs.
"""

import dataclasses
import os
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.errors import OctavoError
from octavo.models import Llama
from octavo.parallel.ranks import Ranks
from octavo.parsing import read_tensors
from octavo.text.tokens import open_data
from octavo.training import checkpoint, loop, rank_layout, setup
from octavo.training.config import ParallelConfig, RunConfig
from octavo.training.events import StepDone
from octavo.training.loop import Trainer, train
from octavo.training.loss_scaling import LossScaler
from octavo.training.setup import build_model
from tests.contract.rank_processes import Checks, run_ranks
from tests.unit.training.tiny_runs import tiny_config

RECIPES = ("fp32", "bf16", "tensorwise", "delayed", "rowwise", "blockwise", "mxfp8")
STEPS = 4
CHAIN_STEPS = 8
CHAIN: dict[str, Any] = {
    "recipe": "delayed", "grad_accumulation": 4, "steps": CHAIN_STEPS, "recipe_options": {"history_length": 3},
}  # fmt: skip


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
    check_interval: int = 1,
    **training: Any,
) -> RunConfig:
    """A tiny run of two micro-batches an update, evaluated in several forward passes."""
    settings = {"grad_accumulation": 2, "steps": STEPS, "eval_tokens": 0, "statistics_interval": 2, **training}
    parallel = ParallelConfig(shard=shard, data=data, tensor=tensor, sequence=sequence, check_interval=check_interval)
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


def chain_of_two(folder: Path) -> str:
    return stopping(config_of(shard=2, **CHAIN), folder, "chain", after=4, resume=True)


def chain_of_four(folder: Path) -> str:
    return stopping(config_of(shard=2, data=2, **CHAIN), folder, "chain", after=6, resume=True)


class Collectives(TorchDispatchMode):
    """Count of the collectives in a block, by their kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and count an operation."""
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[func.overloadpacket.__name__.strip("_")] += 1
        return func(*args, **(kwargs or {}))


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


def loaded(folder: Path) -> list[bool]:
    """Whether the ranks hold, whole, what a checkpoint of one process holds; in every layout."""
    size, data, equal = distributed.get_world_size(), open_data(folder / "data"), []
    layouts: tuple[dict[str, Any], ...] = ({}, {"shard": size}, {"tensor": 2, "shard": size // 2})
    for sizes in layouts:
        config = config_of(recipe="delayed", grad_accumulation=4, **sizes)
        model, converted = build_model(config, data.vocab_size)
        ranks = Ranks.current(tensor=config.parallel.tensor)
        trainer = Trainer(config, folder / "of one", model, data=data, on_event=print, converted=converted, ranks=ranks)
        assert trainer.checkpoint is not None
        files = checkpoint._tensors_by_file(trainer.model, trainer.optimizer, trainer.ranks)
        for name, tensors in files.items():
            stored = read_tensors(trainer.checkpoint / name)
            equal.append(
                not trainer.ranks.is_first
                or (stored.keys() == tensors.keys() and all(torch.equal(stored[key], tensors[key]) for key in stored))
            )
    return equal


def with_model(config: RunConfig, folder: Path, name: str, change: Callable[[Llama], None], **options: Any) -> str:
    """Train a model that one rank has changed after it was built."""

    def changed(*arguments: Any) -> tuple[Llama, int]:
        model, converted = build_model(*arguments)
        if distributed.get_rank() == 1:
            change(model)
        return model, converted

    with mock.patch.object(loop, "build_model", changed):
        return run(config, folder, name, **options)


def nan_on_one_rank(folder: Path) -> list[str]:
    calls = []

    def break_third(mlp: nn.Module, _: object, output: Tensor) -> Tensor | None:
        calls.extend([1] * mlp.training)
        return output * float("nan") if len(calls) > 2 else None

    def change(model: Llama) -> None:
        calls.clear()
        model.get_submodule("model.layers.0.mlp").register_forward_hook(break_third)

    config: dict[str, Any] = {"recipe": "delayed", "eval_interval": 0, "statistics_interval": 0}
    return [with_model(config_of(shard=shard, **config), folder, f"nan-{shard}", change) for shard in (1, 2)]


def altered_scale(folder: Path) -> str:
    layers: list[Any] = []

    def on_event(event: object) -> None:
        if isinstance(event, StepDone) and event.step == 2 and layers:
            layers[0].amax_history.amax[0] *= 1.5

    def change(model: Llama) -> None:
        layers.append(model.get_submodule("model.layers.0.mlp.up_proj"))

    return with_model(config_of(recipe="delayed"), folder, "altered scale", change, on_event=on_event)


def altered_weight(folder: Path) -> str:
    weights: list[Any] = []

    def on_event(event: object) -> None:
        if isinstance(event, StepDone) and event.step == 1 and weights:
            weights[0].data[2, 0] += 1.0

    def change(model: Llama) -> None:
        weights.append(model.get_parameter("model.layers.0.self_attn.o_proj.weight"))

    return with_model(config_of(recipe="tensorwise"), folder, "altered weight", change, on_event=on_event)


def other_generator(folder: Path) -> str:
    def change(_: Llama) -> None:
        torch.manual_seed(9)

    return with_model(config_of(), folder, "generator", change)


def other_recipe(folder: Path) -> str:
    return run(config_of(recipe=("rowwise", "delayed")[distributed.get_rank()]), folder, "other recipe")


def other_version(folder: Path) -> str:
    with mock.patch.object(rank_layout, "own_version", return_value=f"9.{distributed.get_rank()}"):
        return run(config_of(), folder, "other version")


def refused(folder: Path) -> list[str]:
    late = (("bf16", 0.0), ("fp8", 0.5))
    one_head = dataclasses.replace(config_of(tensor=2), model=tiny_config().model)
    configs = (
        config_of(grad_accumulation=3),
        config_of(shard=4),
        config_of(recipe="rowwise", autopilot=True),
        config_of(recipe="mxfp8", tensor=2, precision_schedule=late),
        one_head,
        config_of(tensor=2, sequence=True, context=15),
    )
    return [run(config, folder, "refused") for config in configs]


OF_TWO = (
    every_recipe,
    loss_scale,
    tensor_parallel,
    phases,
    interrupted,
    collectives,
    loaded,
    nan_on_one_rank,
    altered_scale,
    altered_weight,
    other_generator,
    other_recipe,
    other_version,
    refused,
    chain_of_two,
)
OF_FOUR = (loaded, four_ranks, chain_of_four)


def checks(ranks: int) -> Checks:
    return {check.__name__: partial(_in_folder, check) for check in (OF_TWO if ranks == 2 else OF_FOUR)}


def _in_folder(check: Callable[[Path], Any], _rank: int, folder: Path) -> Any:
    return check(folder)


if __name__ == "__main__":
    run_ranks(checks)

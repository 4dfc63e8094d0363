"""Checks of tests/contract/training_ranks_program.py: ranks that differ, fail or hang."""

import dataclasses
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn

from octavo.models import Llama
from octavo.parallel import heartbeat
from octavo.training import checkpoint, loop, rank_layout, run_folder
from octavo.training.config import RunConfig
from octavo.training.events import StepDone
from octavo.training.loop import Trainer
from octavo.training.setup import build_model
from tests.contract.rank_processes import regrouped
from tests.contract.training_ranks_program import config_of, run
from tests.unit.training.tiny_runs import tiny_config

__all__ = ["NAN_LAYOUTS", "OF_FOUR", "OF_TWO"]

NAN_LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp2": {"shard": 2},
    "tensor": {"tensor": 2},
    "sequence": {"tensor": 2, "sequence": True},
}

# Among how many ranks the weights are divided, and the module in which one sleeps.
STALLS = ((1, "model.layers.0.self_attn"), (2, "model.layers.0.self_attn"), (2, "model.embed_tokens"))


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
    return [
        with_model(config_of(**sizes, **config), folder, f"nan-{name}", change) for name, sizes in NAN_LAYOUTS.items()
    ]


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


def altered_nan(folder: Path) -> str:
    """A NaN of other bits in a scale, which compares equal to no number and prints as any other."""
    layers: list[Any] = []

    def on_event(event: object) -> None:
        if isinstance(event, StepDone) and event.step == 2:
            window = layers[0].amax_history.window
            bits = torch.tensor([0x7FC00000 + distributed.get_rank()], dtype=torch.int32)
            window[0, -1] = bits.view(torch.float32)[0]

    def build(*arguments: Any) -> tuple[Llama, int]:
        model, converted = build_model(*arguments)
        layers.append(model.get_submodule("model.layers.0.mlp.up_proj"))
        return model, converted

    with mock.patch.object(loop, "build_model", build):
        return run(config_of(recipe="delayed"), folder, "altered nan", on_event=on_event)


def altered_step(folder: Path) -> str:
    """The second rank leaves a step out, long before the next comparison of states."""
    take = Trainer.train_step

    def counting(trainer: Trainer, log: Any) -> None:
        trainer.step += distributed.get_rank() == 1 and trainer.step == 2
        take(trainer, log)

    with mock.patch.object(Trainer, "train_step", counting):
        return run(config_of(check_interval=10), folder, "altered step")


def altered_shard(folder: Path) -> str:
    """One of two replicas of a shard."""
    return altered_part(folder, "model.layers.0.self_attn.o_proj.weight", 32, shard=2)


def altered_norm(folder: Path) -> str:
    """A norm, which ranks that share the layers hold whole."""
    return altered_part(folder, "model.norm.weight", 3, tensor=2)


def altered_shard_of_norm(folder: Path) -> str:
    return altered_part(folder, "model.norm.weight", 3, shard=2, tensor=2)


def altered_part(folder: Path, name: str, element: int, **sizes: Any) -> str:
    """Train with an element of the second rank's part changed after the first step."""

    def on_event(event: object) -> None:
        if isinstance(event, StepDone) and event.step == 1 and models:
            weight: Any = models[0].get_parameter(name)
            weight.to_local().detach().view(-1)[element] += 1.0

    models: list[Llama] = []
    config = config_of(recipe="tensorwise", grad_accumulation=4, **sizes)
    return with_model(config, folder, f"altered {name} {sizes}", models.append, on_event=on_event)


def stalled(folder: Path) -> list[str]:
    """The second rank sleeps in its third forward pass of a module; torch's time-out comes after two seconds."""
    rank, said = distributed.get_rank(), []
    for shard, module in STALLS:
        name = f"stalled {shard} {module}"
        with regrouped(folder, name, rank, 2), mock.patch.object(heartbeat, "PATIENCE_S", 1.0):
            said.append(asleep(folder, shard, module))
    return said


def asleep(folder: Path, shard: int, module: str) -> str:
    calls: list[int] = []

    def sleep(called: nn.Module, _: object) -> None:
        calls.extend([1] * called.training)
        if len(calls) == 3:
            time.sleep(5)

    def change(model: Llama) -> None:
        model.get_submodule(module).register_forward_pre_hook(sleep)

    def on_event(event: object) -> None:
        if isinstance(event, StepDone):
            for group in list(distributed.distributed_c10d._world.pg_map):
                distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=2), group)

    try:
        config = config_of(shard=shard, recipe="rowwise", grad_accumulation=4)
        return with_model(config, folder, f"asleep {shard} {module}", change, on_event=on_event)
    except RuntimeError as error:
        return str(error)


def other_generator(folder: Path) -> str:
    def change(_: Llama) -> None:
        torch.manual_seed(9)

    return with_model(config_of(), folder, "generator", change)


def other_recipe(folder: Path) -> str:
    return run(config_of(recipe=("rowwise", "delayed")[distributed.get_rank()]), folder, "other recipe")


def other_checkpoint(folder: Path) -> str:
    config = config_of(checkpoint_interval=2)
    run(config, folder, "stale")
    older, newest = sorted((folder / "stale" / checkpoint.FOLDER).iterdir())[-2:]
    seen = (newest, older)[distributed.get_rank()]
    with mock.patch.object(run_folder, "latest", return_value=seen):
        return run(config, folder, "stale", resume=True)


def other_version(folder: Path) -> str:
    with mock.patch.object(rank_layout, "own_version", return_value=f"9.{distributed.get_rank()}"):
        return run(config_of(), folder, "other version")


def refused(folder: Path) -> list[str]:
    late = (("bf16", 0.0), ("fp8", 0.5))
    one_head = dataclasses.replace(config_of(tensor=2), model=tiny_config().model)
    odd = dataclasses.replace(one_head, model=dataclasses.replace(config_of().model, intermediate_size=33))
    configs = (
        config_of(grad_accumulation=3),
        config_of(shard=4),
        config_of(recipe="rowwise", autopilot=True),
        config_of(recipe="mxfp8", tensor=2, precision_schedule=late),
        one_head,
        odd,
        config_of(tensor=2, sequence=True, context=15),
    )
    return [run(config, folder, "refused") for config in configs]


OF_TWO = (
    nan_on_one_rank,
    altered_scale,
    altered_weight,
    altered_norm,
    altered_nan,
    altered_step,
    other_generator,
    other_recipe,
    other_checkpoint,
    other_version,
    refused,
    stalled,
)
OF_FOUR = (altered_shard, altered_shard_of_norm)

"""Other people's training loops on two ranks: ``python -m tests.contract.wrappers_program FOLDER RANKS``.

The loops are those of the examples. accelerate, and with it transformers' Trainer, shards on GPUs alone: on a CPU it
wraps the model by DDP whatever its plugin says. :func:`on_a_gpu` lets it take these ranks for ones with GPUs, so that
its own code for FSDP2 runs; torch's, which it calls, needs none.
"""

import os
import runpy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import pytorch_lightning
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.utils.data import DistributedSampler

import octavo
from tests.contract.rank_processes import named, regrouped, run_ranks
from tests.policy.source_tree import ROOT

GENERATOR = torch.Generator().manual_seed(1)
DATA = torch.randn(128, 64, generator=GENERATOR) * torch.randn(128, 1, generator=GENERATOR).exp2()
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


def example(name: str) -> dict[str, Any]:
    """What an example defines."""
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))


@contextmanager
def launched(rank: int) -> Iterator[None]:
    """The variables of torchrun's two ranks, and an accelerate that has not seen others."""
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}  # the group is there already
    AcceleratorState._reset_state(reset_partial_state=True)
    with mock.patch.dict(os.environ, place), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


@contextmanager
def on_a_gpu() -> Iterator[None]:
    """Let accelerate take gloo between CPUs for what it has on GPUs."""

    def use_cpu(state: PartialState) -> None:
        state.device = torch.device("cpu")

    gpus = ("gloo", DistributedType.MULTI_GPU)
    with (
        mock.patch.object(PartialState, "_prepare_backend", return_value=gpus),
        mock.patch.object(PartialState, "set_device", use_cpu),
    ):
        yield


def trainer(rank: int, folder: Path, *, fsdp2: bool) -> Any:
    """The run, and the end of one that continues its checkpoint of the second of four steps."""
    name = str(folder / f"trainer {fsdp2}")
    with launched(rank), on_a_gpu() if fsdp2 else nullcontext():
        return [trained(name, fsdp2=fsdp2), trained(name, fsdp2=fsdp2, resume=f"{name}/checkpoint-2")]


def trained(folder: str, **options: Any) -> dict[str, Any]:
    """Losses and state of a Trainer."""
    finished = example("trainer_on_ranks")["train"](folder, disable_tqdm=True, **options)
    losses = [line["loss"] for line in finished.state.log_history if "loss" in line]
    wrapper = type(finished.model_wrapped).__name__
    return {"losses": losses, "wrapper": wrapper} | state_of(finished.model)


def accelerated(rank: int, _: Path, *, fsdp2: bool, **options: Any) -> Any:
    with launched(rank), on_a_gpu() if fsdp2 else nullcontext():
        model, losses = example("accelerate_on_ranks")["train"](fsdp2=fsdp2, **options)
    return {"losses": losses} | state_of(model)


def lightning(rank: int, _: Path, *, fsdp2: bool) -> Any:
    with launched(rank):
        module = example("lightning_on_ranks")["train"](DATA, fsdp2=fsdp2, ranks=2, **QUIET)
    return {"losses": module.losses} | state_of(module)


def state_of(model: nn.Module) -> dict[str, Any]:
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    return {"state": octavo.scaling_state(model), "weights": [each.detach().clone() for each in whole]}


def of_one_process(rank: int, folder: Path) -> Any:
    """The runs of one process that accumulates what the ranks compute: the Trainer's here, the others there."""
    with regrouped(folder, "none", rank, 0):
        if not rank:
            return trained(str(folder / "trainer of one"), gradient_accumulation_steps=2)
        model, losses = example("accelerate_on_ranks")["train"](micro_batches=2)
        rows: Any = DATA
        # Lightning shuffles on several ranks, and gives each of them every other row.
        orders: Any = [list(DistributedSampler(rows, 2, rank)) for rank in range(2)]
        alternating = DATA[torch.tensor(orders).view(2, 4, 16).transpose(0, 1).flatten()]
        module = example("lightning_on_ranks")["train"](alternating, accumulate_grad_batches=2, **QUIET)
        return {
            "accelerated": {"losses": losses} | state_of(model),
            "lightning": {"losses": module.losses} | state_of(module),
        }


def fsdp_on_a_cpu(rank: int, _: Path) -> tuple[str, list[str]]:
    """What Lightning's FSDPStrategy says, and how accelerate wraps by a plugin for FSDP2, with and without ``cpu``."""
    made = []
    with pytest.raises(ValueError, match="requires a GPU") as told:
        pytorch_lightning.Trainer(strategy="fsdp", devices=2, **QUIET)
    for options in ({"cpu": True}, {}):
        with launched(rank):
            accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), **options)
            made.append(type(accelerator.prepare(nn.Linear(8, 8))).__name__)
    return str(told.value), made


def checks(_: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for fsdp2 in (False, True):
        wrapper = "fsdp2" if fsdp2 else "ddp"
        for check in (trainer, accelerated, lightning):
            found[f"{check.__name__} {wrapper}"] = lambda *args, check=check, fsdp2=fsdp2: check(*args, fsdp2=fsdp2)
    found["accelerated ram"] = lambda *args: accelerated(*args, fsdp2=True, cpu_ram_efficient_loading=True)
    return found | named(fsdp_on_a_cpu, of_one_process)


if __name__ == "__main__":
    run_ranks(checks)

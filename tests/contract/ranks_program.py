"""One of two ranks, whose data differ 64-fold: ``python -m tests.contract.ranks_program FOLDER RANKS``."""

from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.compat import ScalingState
from octavo.compat.transformer_engine import pytorch as te
from octavo.compat.transformer_engine.common.recipe import DelayedScaling
from octavo.errors import ConfigError
from octavo.training.loop import Trainer
from octavo.training.setup import build_model
from tests.contract.calibrating_ranks import calibrated_together, refused_calibrations
from tests.contract.overflowing_ranks import overflow_state
from tests.contract.pipelined_ranks import pipeline, pipeline_compiled
from tests.contract.rank_processes import Collectives, kept_bytes, named, run_ranks
from tests.contract.ranks_between_steps import nonfinite_of_one_rank, read_before_the_reduction, zero_redundancy
from tests.contract.sampled_ranks import sampled_by_fsdp2
from tests.unit.training.tiny_runs import tiny_config, tiny_data

STEPS, RATIO = 4, 64.0
RECIPE = octavo.recipes.get("delayed", history_length=3)
RECIPES = octavo.recipes.names()
STATIC_SCALE = torch.tensor(0.02)
MANY = 1000
WIDTH, ROWS = 256, (1, 8, 32, 128, 255, 256, 512, 1024)


def build(**options: Any) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    octavo.convert(model, RECIPE, **options)
    return model


def batches(rank: int, *, micro: int = 1, steps: int = STEPS) -> Iterator[list[Tensor]]:
    """Each step's micro-batches; amaxes fall from step to step, so that windows and their maxima count."""
    generator = torch.Generator().manual_seed(rank)
    for step in range(steps):
        yield [torch.randn(5, 8, generator=generator) * RATIO**rank / 2**step for _ in range(micro)]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=1e-6)


def train(model: nn.Module, rank: int, *, micro: int = 1, steps: int = STEPS, average: bool = False) -> dict[str, Any]:
    """Losses, gradients and histories of a few steps."""
    optimizer, losses, grads = optimizer_of(model), [], []
    for step in batches(rank, micro=micro, steps=steps):
        for index, batch in enumerate(step):
            is_last = index == len(step) - 1
            quiet = model.no_sync() if not is_last and isinstance(model, DistributedDataParallel) else nullcontext()
            with quiet:
                loss = model(batch).square().mean()
                loss.backward()
            losses.append(loss.item())
        grads.append([_whole(each.grad, average=average) for each in model.parameters() if each.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    inner = getattr(model, "module", model)
    return {"losses": losses, "grads": grads, "state": octavo.scaling_state(inner)}


def _whole(grad: Tensor, *, average: bool) -> Tensor:
    if hasattr(grad, "full_tensor"):
        return grad.full_tensor().clone()
    if average:
        distributed.all_reduce(grad)
        grad /= distributed.get_world_size()
    return grad.clone()


def ddp(rank: int, _: Path) -> Any:
    return {
        broadcast: train(DistributedDataParallel(build(), broadcast_buffers=broadcast), rank)
        for broadcast in (True, False)
    }


def ddp_accumulating(rank: int, _: Path) -> Any:
    return train(DistributedDataParallel(build()), rank, micro=3)


def no_wrapper(rank: int, _: Path) -> Any:
    return train(build(), rank, average=True)


def fsdp2(rank: int, _: Path) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = build(), init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return train(model, rank)


def uneven(recipe: str) -> nn.Sequential:
    """A model whose 33 rows two ranks cannot share equally."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(24, 33), nn.GELU(), nn.Linear(33, 24))
    octavo.convert(model, recipe)
    return with_static_scales(model, recipe)


def with_static_scales(model: nn.Module, recipe: str) -> Any:
    if octavo.recipes.get(recipe).has_static_input:
        octavo.load_scaling_state(model, dict.fromkeys(octavo.scaling_state(model), STATIC_SCALE))
    return model


def uneven_batches(rank: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(10 + rank)
    for _ in range(STEPS):
        yield torch.randn(40, 24, generator=generator)


def momentum_of(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer whose steps change the weights' codes."""
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def _fully_sharded(model: nn.Sequential) -> nn.Sequential:
    """Each layer gives its weight back after its forward pass and gathers it again for its backward pass."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fully_sharded_training(rank: int, _: Path) -> Any:
    return {
        (recipe, checkpointed): _train_sharded(_fully_sharded(uneven(recipe)), rank, checkpointed=checkpointed)
        for recipe in RECIPES
        for checkpointed in (False, True)
    }


def _train_sharded(model: nn.Module, rank: int, *, checkpointed: bool) -> dict[str, Any]:
    optimizer, losses, grads = momentum_of(model), [], []
    for batch in uneven_batches(rank):
        y = checkpoint(model, batch, use_reentrant=False) if checkpointed else model(batch)
        loss = y.square().mean()
        loss.backward()
        losses.append(loss.item())
        grads.append([_whole(each.grad, average=False) for each in model.parameters() if each.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    weights = [_whole(each.detach(), average=False) for each in model.parameters()]
    return {"losses": losses, "grads": grads, "weights": weights, "state": octavo.scaling_state(model)}


def kept_when_fully_sharded(_rank: int, _: Path) -> Any:
    """Bytes that a layer keeps from forward to backward, by recipe and number of rows."""
    found = {}
    for recipe in RECIPES:
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16))
        octavo.convert(layer, recipe)
        model = _fully_sharded(with_static_scales(layer, recipe))
        inputs = (torch.randn(rows, WIDTH, dtype=torch.bfloat16, requires_grad=True) for rows in ROWS)
        found[recipe] = [kept_bytes(model, x) for x in inputs]
    return found


def fsdp1(rank: int, _: Path) -> Any:
    """Flat parameters: the optimizer holds none of the layers' own, or slices of them. Losses can be compared."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    results = {}
    for use_orig_params in (False, True):
        model = FullyShardedDataParallel(build(), device_id=torch.device("cpu"), use_orig_params=use_orig_params)
        results[use_orig_params] = train(model, rank) | {"state": octavo.scaling_state(model.module)}
        del results[use_orig_params]["grads"]
    return results


def under_autocast(rank: int, _: Path) -> Any:
    """Plain octavo layers, each with updates of its own; ``delayed`` closes with the optimizer, ``delayed_te`` with
    blocks too."""
    found = {}
    for recipe in ("delayed", "delayed_te"):
        torch.manual_seed(3)
        model = nn.Sequential(octavo.nn.Linear(8, 16), nn.ReLU(), octavo.nn.Linear(16, 4))
        optimizer = optimizer_of(model)
        for step in batches(rank, micro=2):
            for batch in step:
                with octavo.autocast(recipe):
                    model(batch).square().mean().backward()
            optimizer.step()
        found[recipe] = octavo.scaling_state(model)
    return found


def named_groups(rank: int, _: Path) -> Any:
    both = distributed.new_group([0, 1])
    return {
        "rank": train(build(amax_group="rank"), rank)["state"],
        "group": train(build(amax_group=both), rank)["state"],
        "manual": _manual(rank),
        "manual, rank": _manual(rank, amax_group="rank"),
        "manual, group": _manual(rank, group=both),
        "manual, named": _manual(rank, amax_group=both),
    }


def _manual(rank: int, *, group: Any = None, amax_group: Any = None) -> Any:
    model = build(scale_updates="manual", amax_group=amax_group)
    for (batch,) in batches(rank):
        model(batch).square().mean().backward()
        octavo.update_scales(model, group=group)
    return octavo.scaling_state(model)


def unused_on_a_rank(rank: int, _: Path) -> Any:
    """Rank 0 alone runs the second expert, and no rank the third."""
    torch.manual_seed(3)
    experts = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))
    octavo.convert(experts, RECIPE)
    optimizer = optimizer_of(experts)
    for (batch,) in batches(rank):
        y = experts[0](batch)
        (y + experts[1](batch) if rank == 0 else y).square().mean().backward()
        optimizer.step()
    return octavo.scaling_state(experts)


def other_layers(rank: int, _: Path) -> str:
    """A rank with a layer more."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2 + rank)))
    octavo.convert(model, RECIPE)
    model(torch.ones(1, 8)).sum().backward()
    try:
        optimizer_of(model).step()
    except ConfigError as error:
        return str(error)
    return "nothing was said"


def other_experts(rank: int, _: Path) -> str:
    """A rank whose layer has an expert more."""
    experts = 2 + rank
    layer = octavo.nn.GroupedLinear(experts, 8, 8, recipe="delayed")
    layer(torch.ones(experts, 8), torch.arange(experts + 1)).sum().backward()
    try:
        optimizer_of(layer).step()
    except ConfigError as error:
        return str(error)
    return "nothing was said"


def teacher_on_one_rank(rank: int, _: Path) -> list[str]:
    """A frozen teacher that both ranks run in the second step and the first rank alone in the fourth; what is said."""
    model, teacher, said = build(), build(), []
    teacher.requires_grad_(False)
    optimizer = optimizer_of(model)
    for step in range(4):
        x = torch.ones(1, 8, requires_grad=True)
        if step == 1 or (step == 3 and rank == 0):
            teacher(x)
        model(x).sum().backward()
        try:
            optimizer.step()
        except ConfigError as error:
            said.append(str(error))
    return said


def autocast_on_one_rank_first(rank: int, _: Path) -> list[str]:
    """The second rank's first step is dynamic, so that its second meets the first's first."""
    model = nn.Sequential(octavo.nn.Linear(8, 4))
    optimizer, said = optimizer_of(model), []
    for step in range(1 + rank):
        with octavo.autocast("delayed" if step == rank else "tensorwise"):
            model(torch.ones(1, 8)).sum().backward()
        try:
            optimizer.step()
        except ConfigError as error:
            said.append(str(error))
    return said


def joined(rank: int, _: Path) -> Any:
    """Ranks with 2 and 3 batches: what is said, and the steps of a model that reduces nothing."""
    model = DistributedDataParallel(build())
    with pytest.raises(ConfigError) as told, model.join():
        model(torch.ones(1, 8))
    alone = build(amax_group="rank")
    wrapper = DistributedDataParallel(alone)
    optimizer = optimizer_of(wrapper)
    with wrapper.join():
        for _step in range(2 + rank):
            wrapper(torch.ones(1, 8)).sum().backward()
            optimizer.step()
    return {"said": str(told.value), "steps": octavo.scaling_state(alone)["0.input.steps"].item()}


def overflow_on_one_rank(rank: int, _: Path) -> dict[str, Tensor]:
    """The second rank's second input holds an infinity; its recipe backs off."""
    return overflow_state([rank])


def many_layers(rank: int, folder: Path) -> Any:
    """More layers than the first all-reduce takes, each with an input of its own; how many each step takes.

    Then what is said of layers that differ, once the ranks have agreed on a longer one.
    """
    model = nn.ModuleList(octavo.nn.Linear(2, 2, recipe="delayed") for _ in range(MANY))
    optimizer, reduces = optimizer_of(model), []
    for _step in range(3):
        sum(layer(torch.full((1, 2), amax_of(index, rank))).sum() for index, layer in enumerate(model)).backward()
        with Collectives() as counted:
            optimizer.step()
        reduces.append(dict(counted.counts))
    return {"state": octavo.scaling_state(model), "reduces": reduces, "others": other_layers(rank, folder)}


def amax_of(index: int, rank: int) -> float:
    """The larger one is now on this rank, now on the other."""
    return 1.0 + index + (0.5 if index % 2 == rank else 0.0)


def reduces_a_step(_rank: int, _: Path) -> int:
    """How many all-reduces three steps of two models take that one optimizer trains."""
    model = nn.ModuleList([build(), build()])
    optimizer = optimizer_of(model)
    with Collectives() as counted:
        for _step in range(3):
            sum(each(torch.ones(1, 8)).sum() for each in model).backward()
            optimizer.step()
    return counted.counts["allreduce"]


def one_more_step(rank: int, _: Path) -> str:
    """The first rank's second step waits for a rank that ends; no check can follow."""
    model = build()
    optimizer = optimizer_of(model)
    for _step in range(2 - rank):
        model(torch.ones(1, 8)).sum().backward()
        try:
            optimizer.step()
        except ConfigError as error:
            return str(error)
    return "nothing was said"


def distributed_checkpoint(rank: int, folder: Path) -> Any:
    """Train, save, train on; and load into a model that has seen nothing, train on."""
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    through, resumed = build(), build()
    train(through, rank, steps=3, average=True)
    save({"model": through.state_dict(), "scaling": ScalingState(through)}, checkpoint_id=folder / "saved")
    parts: dict[str, Any] = {"model": resumed.state_dict(), "scaling": ScalingState(resumed)}
    load(parts, checkpoint_id=folder / "saved")
    resumed.load_state_dict(parts["model"])
    return [train(model, rank, average=True) for model in (through, resumed)]


def compiled_blocks(_rank: int, _: Path) -> str:
    """A graph of a layer that ends steps with blocks."""
    layer = torch.compile(octavo.nn.Linear(8, 4, recipe="delayed_te"), fullgraph=True, backend="eager")
    try:
        with octavo.autocast():
            layer(torch.ones(1, 8))
    except torch._dynamo.exc.Unsupported as error:
        return str(error)
    return "nothing was said"


def transformer_engine_blocks(_rank: int, _: Path) -> Any:
    """The input's window of a layer in blocks of several groups: its steps' amaxes, newest first."""
    alone = [distributed.new_group([one]) for one in range(2)][distributed.get_rank()]
    both = distributed.new_group([0, 1])
    kept = DelayedScaling(amax_history_len=4, reduce_amax=False)
    return {
        "default": _windows([{}, {}]),
        "both": _windows([{"amax_reduction_group": both}] * 2),
        "alone": _windows([{"amax_reduction_group": alone}] * 2),
        "kept": _windows([{"recipe": kept}] * 2),
        "one, then all": _windows([{"amax_reduction_group": alone}, {}, {"amax_reduction_group": alone}]),
        "calibrated": _windows([{"enabled": False, "calibrating": True}] * 2),
        "calibrated alone": _windows([{"enabled": False, "calibrating": True, "amax_reduction_group": alone}] * 2),
    }


def _windows(blocks: list[dict[str, Any]]) -> list[float]:
    """Step i's input is i + 1 times 1 on rank 0 and times 10 on rank 1."""
    torch.manual_seed(3)
    layer = te.Linear(8, 4)
    for index, options in enumerate(blocks):
        with te.autocast(**{"recipe": DelayedScaling(amax_history_len=4), **options}):
            loss = layer(torch.full((2, 8), (index + 1) * 10.0 ** distributed.get_rank())).sum()
        loss.backward()
    torch.optim.SGD(layer.parameters(), lr=1e-6).step()  # ends the last step
    return octavo.scaling_state(layer)["linear.input.amax_history"].tolist()


def trainer(rank: int, folder: Path) -> dict[str, Tensor]:
    """A step of ``octavo train``'s loop; each rank has its own seed, and so weights and text."""
    return trained_state(folder / f"trainer{rank}", seed=rank)


def trained_state(folder: Path, *, seed: int) -> dict[str, Tensor]:
    """The scaling state after one step of a tiny run."""
    folder.mkdir()
    config, data = tiny_config(recipe="delayed", seed=seed), tiny_data(folder)
    model, converted = build_model(config, data.vocab_size)
    running = Trainer(config, folder, model, data=data, on_event=lambda _: None, converted=converted)
    with closing(running.open_log()) as log:
        running.train_step(log)
    return octavo.scaling_state(model)


CHECKS: tuple[Callable[[int, Path], Any], ...] = (
    ddp,
    ddp_accumulating,
    no_wrapper,
    fsdp2,
    fully_sharded_training,
    kept_when_fully_sharded,
    fsdp1,
    under_autocast,
    named_groups,
    unused_on_a_rank,
    other_layers,
    other_experts,
    pipeline,
    pipeline_compiled,
    distributed_checkpoint,
    compiled_blocks,
    transformer_engine_blocks,
    trainer,
    teacher_on_one_rank,
    autocast_on_one_rank_first,
    joined,
    overflow_on_one_rank,
    many_layers,
    reduces_a_step,
    zero_redundancy,
    read_before_the_reduction,
    nonfinite_of_one_rank,
    sampled_by_fsdp2,
    calibrated_together,
    refused_calibrations,
    one_more_step,
)


if __name__ == "__main__":
    run_ranks(lambda _: named(*CHECKS))

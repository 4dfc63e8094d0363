"""Checks of tests/contract/gathered_weights_program.py: ways in which gathered weights are used."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.nn import Linear
from octavo.parallel import gather_in_fp8
from octavo.parallel.weight_gather import WeightGather
from tests.contract.gathered_weights_training import (
    RECIPES,
    STATIC_SCALE,
    batches,
    build,
    compared,
    counting,
    difference,
    shard,
    sharded,
    step_once,
    train,
)
from tests.contract.rank_processes import kept_bytes

__all__ = [
    "checkpointed",
    "compiled",
    "counted_writes",
    "evaluating_alone",
    "frozen",
    "kept_for_backward",
    "loaded",
    "micro_batches",
    "nonfinite_weights",
    "offloaded",
    "prefetched",
    "switched_recipes",
    "unseen_writes",
    "watched",
]

WIDTH, ROWS = 256, (1, 32, 1024)
IN_TURN: tuple[str | None, ...] = ("rowwise", None, "mxfp8")  # recipes of the steps; None is high precision


def switched_recipes(rank: int, _: Path) -> Any:
    """Differences where steps and evaluations run other recipes; where weights are gathered twice a step, and once."""
    return {
        (name, each): compared(rank, partial(sharded, "tensorwise", each=each), run=run)
        for name, run in (("recipes", _recipes_in_turn), ("evaluation", _evaluated))
        for each in (True, False)
    }


def _recipes_in_turn(model: Any, batch: Tensor, index: int) -> list[float]:
    recipe = IN_TURN[index]
    with octavo.autocast(recipe or "bf16", enabled=recipe is not None):
        return step_once(model, batch, index)


def _evaluated(model: Any, batch: Tensor, index: int) -> list[float]:
    """A step after evaluations in high precision and with another recipe."""
    model.eval()
    with torch.no_grad(), octavo.autocast(enabled=False):
        losses = [model(batch).sum().item()]
    with torch.inference_mode(index > 0), octavo.autocast("rowwise"):
        model.reshard()
        losses.append(model(batch).sum().item())
        model.reshard()
    model.train()
    return losses + step_once(model, batch, index)


def micro_batches(rank: int, _: Path) -> Any:
    """Differences where steps have two micro-batches, and where weights stay gathered between these."""
    return {
        (recipe, kept): compared(rank, partial(sharded, recipe), run=partial(_accumulate, kept=kept))
        for recipe in ("rowwise", "delayed")
        for kept in (False, True)
    }


def _accumulate(model: Any, batch: Tensor, index: int, *, kept: bool) -> list[float]:
    losses = []
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last or not kept)
        losses += step_once(model, batch if last else batch * 2, index)
    return losses


class ForeachSGD:
    """An optimizer of its own kind, whose writes no version of a sharded parameter counts."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters

    @torch.no_grad()
    def step(self) -> None:
        gradients = [each.grad for each in self.parameters if each.grad is not None]
        torch._foreach_add_(self.parameters, gradients, alpha=-3.0)

    def zero_grad(self) -> None:
        for each in self.parameters:
            each.grad = None


def unseen_writes(rank: int, _: Path) -> Any:
    """Differences with an optimizer that is none of torch's, and where evaluation runs other weights for a while."""
    return {
        "optimizer": compared(rank, partial(sharded, "tensorwise"), optimizer=ForeachSGD),
        "evaluation": compared(rank, partial(sharded, "tensorwise"), run=_with_larger_weights),
    }


def counted_writes(rank: int, _: Path) -> Any:
    """Differences where weights are written, or loaded twice as new parameters, between the micro-batches of a step."""
    return {
        "written": compared(rank, partial(sharded, "tensorwise"), run=_written_between),
        "loaded": compared(rank, partial(sharded, "tensorwise"), run=_loaded_between),
    }


def _written_between(model: Any, batch: Tensor, index: int) -> list[float]:
    losses = step_once(model, batch, index)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0 - 1.5 * (index % 2))
    return losses + step_once(model, batch, index)


def _loaded_between(model: Any, batch: Tensor, index: int) -> list[float]:
    """New parameters have the version of those before; an optimizer has held some before."""
    losses = step_once(model, batch, index)
    for factor in (7.0, 0.3, 0.4) if index else ():
        state = {name: value.detach().clone() * factor for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        losses += step_once(model, batch, index)
    return losses


def nonfinite_weights(_rank: int, _: Path) -> int:
    """How many elements of the first weight that are not finite a rank counts, where one is and forward is repeated."""
    model = build("tensorwise")
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    model = shard(model)
    gather_in_fp8(model)
    _around(model, next(batches(0)), 0)
    return octavo.nonfinite_counts(model).get("0.weight", 0)


def _with_larger_weights(model: Any, batch: Tensor, index: int) -> list[float]:
    """A step after an evaluation of weights that are written, and written back, through ``.data``."""
    step_once(model, batch, index)
    for factor in (8.0, 0.125):
        for parameter in model.parameters():
            parameter.data.mul_(factor)
        if factor > 1:
            model.eval()
            with torch.no_grad():
                losses = [model(batch).sum().item()]
            model.reshard()
            model.train()
    return losses + step_once(model, batch, index)


class Checkpointed(nn.Module):
    """A block that repeats its layers' forward pass in backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return output


def checkpointed(rank: int, _: Path) -> Any:
    """Differences with activation checkpointing around, and inside of, what is gathered."""
    mesh = init_device_mesh("cpu", (2,))

    def inside(recipe: str) -> Any:
        block: Any = fully_shard(Checkpointed(build(recipe)), mesh=mesh)
        return fully_shard(nn.Sequential(block), mesh=mesh)

    found = {}
    for recipe in ("tensorwise", "delayed", "rowwise", "static"):
        found[recipe] = [
            compared(rank, partial(inside, recipe)),
            *(compared(rank, partial(sharded, recipe), run=run) for run in (_around, _around_reentrant)),
        ]
    return found


def _around(model: Any, batch: Tensor, index: int, *, reentrant: bool = False) -> list[float]:
    x = batch.clone().requires_grad_()
    return step_once(lambda _: checkpoint(model, x, use_reentrant=reentrant), batch, index)


_around_reentrant = partial(_around, reentrant=True)


def evaluating_alone(rank: int, _: Path) -> Any:
    """Differences where one rank evaluates within a step, and the others' evaluation is in training mode."""
    return {
        (recipe, name): compared(rank, partial(sharded, recipe), run=partial(_in_modes, rank=rank, forward=forward))
        for recipe in ("tensorwise", "delayed")
        for name, forward in (("plain", step_once), ("checkpointed", _around), ("reentrant", _around_reentrant))
    }


def _in_modes(model: Any, batch: Tensor, index: int, *, rank: int, forward: Callable[..., list[float]]) -> list[float]:
    """A step of two micro-batches, in the second of which rank 1 is in ``eval()``, after an evaluation of rank 0."""
    with torch.no_grad():
        losses = [model.train(rank > 0)(batch).sum().item()]
    model.reshard()
    for last in (False, True):
        model.train(not last or rank != 1)
        model.set_requires_gradient_sync(last)
        losses += forward(model, batch * (1 + last), index)
    model.train()
    return losses


def frozen(rank: int, _: Path) -> Any:
    """Differences where the first layer's weight, and all of the second layer, are frozen."""

    def make(recipe: str) -> Any:
        model = build(recipe)
        for parameter in (model[0].weight, model[2].weight, model[2].bias):
            parameter.requires_grad_(False)
        return shard(model)

    return {recipe: compared(rank, partial(make, recipe)) for recipe in ("rowwise", "delayed")}


def loaded(rank: int, folder: Path) -> Any:
    """Differences of training after weights were loaded, and whether codes were still gathered."""
    return {
        how: _trained_after_loading(rank, folder / f"saved_{how}", how)
        for how in ("copy", "assign", "assign blocks", "meta", "dcp")
    }


def _trained_after_loading(rank: int, folder: Path, how: str) -> tuple[list[str], bool]:
    results, sent = [], []
    recipe = "blockwise" if how == "assign blocks" else "rowwise"  # shards of 36 and 65 rows are no blocks of 128
    for gathering in (False, True):
        with torch.device("meta" if how == "meta" else "cpu"):
            model = build(recipe)
        model = shard(model)
        if gathering:
            gather_in_fp8(model)
        if how == "meta":
            model.to_empty(device="cpu")
        else:
            train(model, rank)
        source = shard(build(recipe))
        if how == "dcp":
            _through_a_checkpoint(source, model, folder)
        else:
            model.load_state_dict(source.state_dict(), assign=how.startswith("assign"))
        with counting() as counts:
            results.append(train(model, rank))
        sent.append(counts["bytes"])
    return difference(*results), sent[1] < 0.3 * sent[0]  # of float32


def _through_a_checkpoint(source: nn.Module, target: nn.Module, folder: Path) -> None:
    """Save one model and a full state dict of it, sharded, and load both into another."""
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    gather_in_fp8(source)
    save({"model": get_model_state_dict(source)}, checkpoint_id=folder)
    parts = {"model": get_model_state_dict(target)}
    load(parts, checkpoint_id=folder)
    set_model_state_dict(target, parts["model"])
    options = StateDictOptions(full_state_dict=True)
    one, other = (get_model_state_dict(model, options=options) for model in (source, target))
    assert all(torch.equal(value, other[name]) for name, value in one.items())  # type: ignore[arg-type]


def offloaded(rank: int, _: Path) -> Any:
    return compared(rank, partial(sharded, "rowwise", offload_policy=CPUOffloadPolicy(pin_memory=False)))


def prefetched(rank: int, _: Path) -> Any:
    """Differences where weights are gathered before their layer asks for them."""

    def make() -> Any:
        model = shard(build("rowwise"))
        model[0].set_modules_to_forward_prefetch([model[2]])
        model[4].set_modules_to_backward_prefetch([model[2]])
        return model

    return compared(rank, make)


def compiled(rank: int, _: Path) -> Any:
    """Differences where torch.compile has the layer, and so leaves it out of its graphs."""

    def make() -> Any:
        model = build("rowwise", sizes=(24, 33))
        model[0].compile(backend="eager")
        return shard(model)

    return compared(rank, make)


def kept_for_backward(_rank: int, _: Path) -> Any:
    """Bytes that a layer keeps from forward to backward, by recipe and number of rows."""
    found = {}
    for recipe in ("bf16", *RECIPES):
        layer = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16))
        octavo.convert(layer, recipe)
        if recipe == "static":
            octavo.load_scaling_state(layer, dict.fromkeys(octavo.scaling_state(layer), STATIC_SCALE))
        model = shard(layer)
        if recipe != "bf16":
            gather_in_fp8(model)
        inputs = (torch.randn(rows, WIDTH, dtype=torch.bfloat16, requires_grad=True) for rows in ROWS)
        found[recipe] = [kept_bytes(model, x, partial(_gathered_parts, model[0])) for x in inputs]
    return found


def _gathered_parts(layer: Linear) -> tuple[Tensor, ...]:
    """What the gather of a layer's weight keeps."""
    gather = layer.weight_gather
    return gather._gathered.parts if isinstance(gather, WeightGather) and gather._gathered is not None else ()


class Watch:
    """An observer that reads the weight and the operands, as the doctor does."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def forward(self, _recipe: Any, _x: Tensor, weight: Tensor, operands: Any, kept: Any) -> None:
        sums = [each.dequantize().sum().item() for each in (operands[1], *kept) if each is not None]
        self.seen.append((tuple(weight.shape), weight.float().abs().max().item(), *sums))

    def backward(self, *_: Any) -> None:
        self.seen.append("backward")


def watched(rank: int, _: Path) -> Any:
    """Differences of the steps that an observer sees, and whether it sees the same."""
    watches = []

    def run(model: Any, batch: Tensor, index: int) -> list[float]:
        watch = Watch() if index == 1 else None
        watches.append(watch)
        for layer in model:
            if isinstance(layer, Linear):
                layer.watch = watch
        return step_once(model, batch, index)

    found = compared(rank, partial(sharded, "rowwise"), run=run)
    one, other = (watch.seen for watch in watches if watch is not None)
    assert distributed.get_world_size() == 2
    return found, one == other, len(one)

"""Checks of tests/contract/layouts_program.py: ranks that run other layers, experts or modes than others."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import octavo
from tests.contract.gathered_weights_training import build
from tests.contract.layouts_program import (
    Step,
    batches_of,
    compared,
    ddp,
    differences,
    layouts,
    own,
    same_operand,
    together,
    train,
)

__all__ = ["autocasts", "branches", "evaluating", "frozen", "mixtures", "repeated"]

FEW = ("tensorwise", "delayed", "rowwise", "mxfp8")
OF_EXPERTS = ("tensorwise", "delayed", "rowwise", "rowwise_hp_grad_weight", "blockwise", "mxfp8")


class Mixture(nn.Module):
    """Four experts; the signs of a row's first two numbers are its expert."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.up = octavo.nn.GroupedLinear(4, 24, 32, recipe=recipe)
        self.down = octavo.nn.GroupedLinear(4, 32, 24, recipe=recipe)

    def forward(self, x: Tensor) -> Any:
        expert = (x[:, 0] > 0) + 2 * (x[:, 1] > 0)
        offsets = F.pad(torch.bincount(expert, minlength=4).cumsum(0), (1, 0))
        return self.down(F.gelu(self.up(x[expert.argsort(stable=True)], offsets)), offsets)


def of_one_expert(rank: int) -> list[Tensor]:
    """Each rank's rows have one expert, another one in each step; the fourth expert has none on any rank."""
    signs = ((-1, -1), (1, -1), (-1, 1))
    found = batches_of(rank)
    for step, batch in enumerate(found):
        batch[:, :2] = batch[:, :2].abs() * torch.tensor(signs[(rank + step) % 3])
    return found


def mixtures(_rank: int, _: Path) -> dict[str, list[str]]:
    """Differences where ranks' experts have no rows."""
    wraps = {name: wrap for name, wrap in layouts(distributed.get_world_size()).items() if "codes" not in name}
    return {
        f"{recipe}, {name}": each
        for recipe in OF_EXPERTS
        for name, each in compared(partial(Mixture, recipe), wraps, of_one_expert)
    }


def every_layout_of(make: Callable[[str], nn.Module]) -> dict[str, list[str]]:
    wraps = layouts(distributed.get_world_size())
    return {f"{recipe}, {name}": each for recipe in FEW for name, each in compared(partial(make, recipe), wraps)}


def frozen(_rank: int, _: Path) -> dict[str, list[str]]:
    """Differences where the first layer's weight, and all of the second layer, are frozen."""

    def make(recipe: str) -> Any:
        model = build(recipe)
        for parameter in (model[0].weight, model[2].weight, model[2].bias):
            parameter.requires_grad_(False)
        return model

    return every_layout_of(make)


class Repeating(nn.Sequential):
    """Layers whose forward pass is repeated in backward."""

    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


def repeated(_rank: int, _: Path) -> dict[str, list[str]]:
    """Differences with activation checkpointing."""
    return every_layout_of(lambda recipe: Repeating(*build(recipe)))


class Branching(nn.Module):
    """A layer, and a branch that an input of positive sum takes too."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.layer, self.branch = nn.Linear(24, 24), nn.Linear(24, 24)
        octavo.convert(self, recipe)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y + self.branch(x) if float(x.sum()) > 0 else y


def of_one_sign(rank: int) -> list[Tensor]:
    """Half of the ranks take the branch, in each step others."""
    return [batch.abs() * (-1) ** (rank + step) for step, batch in enumerate(batches_of(rank))]


def branches(_rank: int, _: Path) -> dict[str, list[str]]:
    """Differences under DDP where ranks skip a branch; FSDP2 takes no gradients that only some ranks have."""
    wrap = {"DDP": partial(DistributedDataParallel, find_unused_parameters=True)}
    return {recipe: each for recipe in FEW for _, each in compared(partial(Branching, recipe), wrap, of_one_sign)}


def evaluating(_rank: int, _: Path) -> dict[str, list[str]]:
    """Differences under DDP where one rank evaluates before each step; under FSDP2, see gathered_weights_use.py."""
    found = {}
    for recipe in FEW:
        truth, model = train(build(recipe), together(batches_of)), ddp(build(recipe))
        found[recipe] = list(differences(train(model, evaluated(model, own(batches_of))), truth))
    return found


def evaluated(model: nn.Module, batches: list[list[Tensor]]) -> Iterator[list[Tensor]]:
    """Evaluate on larger inputs than those of any step, on one rank."""
    for step in batches:
        if distributed.get_rank() == 0:
            model.eval()
            with torch.no_grad():
                model(step[0] * 64)
            model.train()
        yield step


def autocasts(_rank: int, _: Path) -> dict[str, list[str]]:
    """Differences of models that ``autocast`` gives the delayed recipe: it has histories only from the first call on.

    In the first step half of the ranks skip a branch, or one rank is in ``eval()`` with gradients.
    """
    wrap = {"DDP": partial(DistributedDataParallel, find_unused_parameters=True)}
    with octavo.autocast("delayed"):
        found = dict(compared(partial(Branching, "tensorwise"), wrap, of_one_sign))
    for name, layout in layouts(distributed.get_world_size()).items():
        converted, cast = layout(build("delayed")), layout(build("tensorwise"))
        truth = train(converted, beginning_in_eval(converted))
        with octavo.autocast("delayed"):
            found[f"{name}, eval"] = list(unlike(train(cast, beginning_in_eval(cast)), truth))
    return found


def beginning_in_eval(model: nn.Module) -> Iterator[list[Tensor]]:
    """This rank's micro-batches; the first step's finds the first rank's model in ``eval()``."""
    for index, step in enumerate(own(batches_of)):
        model.train(index > 0 or distributed.get_rank() > 0)
        yield step


def unlike(found: tuple[list[Step], Any], truth: tuple[list[Step], Any]) -> Iterator[str]:
    """What differs between two runs of one rank."""
    for index, (step, expected) in enumerate(zip(found[0], truth[0], strict=True)):
        if step.losses != expected.losses:
            yield f"step {index}: loss"
        pairs = zip(chain.from_iterable(step.operands), chain.from_iterable(expected.operands), strict=True)
        if not all(same_operand(*each) for gemms in pairs for each in zip(*gemms, strict=True)):
            yield f"step {index}: operands"
    state, expected_state = found[1], truth[1]
    if state.keys() != expected_state.keys() or not all(torch.equal(state[key], expected_state[key]) for key in state):
        yield "scaling state"

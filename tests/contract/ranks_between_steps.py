"""Checks of :mod:`tests.contract.ranks_program` of where steps end on all ranks, and of what is read between them."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import octavo
from octavo.recipes import Close

__all__ = ["nonfinite_of_one_rank", "read_before_the_reduction", "zero_redundancy"]


def zero_redundancy(rank: int, _: Path) -> Any:
    """The optimizer's state is sharded: the first rank's shard is the embedding, the converted layer the second's."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 4, bias=False))
    octavo.convert(model, octavo.recipes.get("delayed", history_length=3), convert_head=True)
    wrapped = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.0)
    tokens = torch.arange(5) + 5 * rank
    for _step in range(4):
        wrapped(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sharded = [id(each) for group in optimizer.optim.param_groups for each in group["params"]]
    return {
        "holds the layer": id(model[1].weight) in sharded,
        "largest": model[0].weight[:10].abs().max().item(),
        "closed": model[1].scale_updates.closed_steps,
        "state": octavo.scaling_state(model),
    }


def nonfinite_of_one_rank(rank: int, _: Path) -> Any:
    """What each rank has counted under DDP, whose second rank meets an infinity in the first step of three."""
    model = nn.Sequential(nn.Linear(8, 4))
    octavo.convert(model, "tensorwise")
    wrapped = DistributedDataParallel(model)
    for step in range(3):
        x = torch.ones(2, 8)
        x[0, 0] = torch.inf if rank and not step else 1.0
        wrapped(x)
    return octavo.nonfinite_counts(model)


def read_before_the_reduction(rank: int, _: Path) -> Any:
    """The input's window as one rank, then all of them read it of a step that is over, and as training goes on."""
    recipe = octavo.recipes.get("delayed_te", history_length=3)
    assert recipe.history is not None
    by_hand = octavo.nn.Linear(8, 4, recipe=replace(recipe, history=replace(recipe.history, close=Close.OPTIMIZER)))
    by_blocks = octavo.nn.Linear(8, 4, recipe=recipe)
    return {"hand": _windows(by_hand, rank, nullcontext), "blocks": _windows(by_blocks, rank, octavo.autocast)}


def _windows(layer: octavo.nn.Linear, rank: int, around: Callable[[], Any]) -> list[list[float]]:
    def run(amax: float) -> None:
        with around():
            layer(torch.full((1, 8), amax * 64.0**rank)).sum().backward()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(1e-3)

    run(1.0)
    run(2.0)
    with pytest.warns(UserWarning, match="leaves out the last step"):
        read = octavo.scaling_state(layer)["input.amax_history"].tolist()
    run(0.5)
    assert layer.amax_history is not None
    followed = layer.amax_history.window[0].tolist()
    octavo.update_scales(layer)
    return [read, followed, octavo.scaling_state(layer)["input.amax_history"].tolist()]

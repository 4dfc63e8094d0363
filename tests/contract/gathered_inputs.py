"""Sequence parallelism whose gathers send codes, against the gather of values: results, and what is sent."""

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

import octavo
from octavo.parallel import gather_input_in_fp8
from tests.contract.gathered_weights_training import gather_name
from tests.contract.rank_processes import within
from tests.contract.tensor_parallel_layers import RECIPES, STATIC_SCALE
from tests.contract.tensor_parallel_models import WIDTH, Feed, whole

SEQUENCES, POSITIONS = 2, 256  # of 128 positions on each of two ranks: a block


def whole_feed(recipe: str) -> Any:
    """An MLP in one process."""
    torch.manual_seed(5)
    model: Any = torch.nn.Sequential(Feed())
    octavo.convert(model, recipe)
    if octavo.recipes.get(recipe).has_static_input:
        octavo.load_scaling_state(model, dict.fromkeys(octavo.scaling_state(model), STATIC_SCALE))
    return model


def feed(recipe: str, *, codes: bool) -> Any:
    """That MLP on ranks; its first two layers gather one input."""
    columns = gather_input_in_fp8(ColwiseParallel(input_layouts=Shard(1))) if codes else ColwiseParallel()
    taken = Shard(1) if codes else Replicate()
    plan: dict[str, Any] = {
        "0": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(taken,)),
        "0.gate": columns,
        "0.up": columns,
        "0.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallelize_module(whole_feed(recipe), init_device_mesh("cpu", (distributed.get_world_size(),)), plan)


def results(recipe: str, *, codes: bool, positions: int = POSITIONS) -> dict[str, list[Tensor]]:
    """Outputs, gradients and scaling state of three steps."""
    model, generator = feed(recipe, codes=codes), torch.Generator().manual_seed(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found: dict[str, list[Tensor]] = {"outputs": [], "weights": [], "inputs": []}
    for step in range(3):
        x = torch.randn(SEQUENCES, positions, 2 * WIDTH, generator=generator) * 2.0**step
        x = x.chunk(distributed.get_world_size(), dim=1)[distributed.get_rank()].clone().requires_grad_()
        y = model(x * 1.5)  # a computed input, which layers share
        y.square().mean().backward()
        found["outputs"].append(y.detach())
        found["weights"] += [whole(each.grad) for each in model.parameters()]
        found["inputs"].append(x.grad.clone())  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        found["outputs"].append(model(x))
    return {**found, "scales": list(octavo.scaling_state(model).values())}


def difference(one: list[Tensor], other: list[Tensor]) -> float:
    """Largest difference of tensors, over the largest number of each."""
    pairs = zip(one, other, strict=True)
    return max([0.0, *(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)])


def gathered_inputs(_rank: int, _: Path) -> Any:
    """By recipe: differences from a gather of values, and bytes of codes that a rank sends in three steps."""
    found = {}
    for recipe, positions in (*((recipe, POSITIONS) for recipe in RECIPES), ("mxfp8", 48)):
        values, name = results(recipe, codes=False, positions=positions), gather_name()
        with (
            mock.patch.object(distributed, name, side_effect=getattr(distributed, name)) as gathers,
            warnings.catch_warnings(action="error", category=FutureWarning),  # of deprecated functions
        ):
            coded = results(recipe, codes=True, positions=positions)
        sent = [call.args[1].nbytes for call in gathers.call_args_list]
        found[f"{recipe} {positions}"] = {name: difference(coded[name], values[name]) for name in values}, sent
    return found


def empty_batches(_rank: int, _: Path) -> Any:
    """By recipe and gather: what two steps of a batch without sequences do otherwise than in one process."""
    found = {}
    for recipe in RECIPES:
        truth = emptied(whole_feed(recipe), POSITIONS)
        for codes in (False, True):
            with within(30):
                one = emptied(feed(recipe, codes=codes), POSITIONS // distributed.get_world_size())
            same = all(map(torch.equal, one, truth))
            found[recipe, codes] = [] if len(one) == len(truth) and same else [one, truth]
    return found


def emptied(model: Any, positions: int) -> list[Tensor]:
    """Gradients and scaling state after two steps of an empty input."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        x = torch.zeros(0, positions, 2 * WIDTH, requires_grad=True)
        y = model(x * 1.5)
        assert y.shape == x.shape
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape
        optimizer.step()
    return [*(whole(each.grad) for each in model.parameters()), *octavo.scaling_state(model).values()]

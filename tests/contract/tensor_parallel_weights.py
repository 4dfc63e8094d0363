"""The amaxes of weights that ranks divide: how often they are reduced, and that every write to a weight is seen."""

import gc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import octavo
from tests.contract.gathered_weights_training import counting
from tests.contract.tensor_parallel_layers import STATIC_SCALE, recorded_operands, unlike_whole

__all__ = ["optimizers_dropped", "rows_written", "weight_reductions", "weights_written"]

SIZE = 64
WIDTHS = (SIZE, 2 * SIZE, SIZE, 2 * SIZE)
Optimizer = Callable[[Any], Any]


def alternating(recipe: str, pairs: int) -> Any:
    """Layers by columns and by rows in turn."""
    model: Any = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(2 * pairs)))
    octavo.convert(model, recipe)
    if octavo.recipes.get(recipe).has_static_input:
        octavo.load_scaling_state(model, dict.fromkeys(octavo.scaling_state(model), STATIC_SCALE))
    styles: dict[str, ParallelStyle] = {}
    for pair in range(pairs):
        styles |= {f"{2 * pair}": ColwiseParallel(), f"{2 * pair + 1}": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (distributed.get_world_size(),)), styles)


def weight_reductions(_rank: int, _: Path) -> Any:
    """All-reduces of each of three steps and of an evaluation, by recipe, pairs of layers and micro-batches."""
    found = {}
    for recipe in ("tensorwise", "rowwise", "static", "delayed"):
        for pairs, micro in ((1, 1), (1, 3), (3, 3)):
            model, counts = alternating(recipe, pairs), list[int]()
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            for _step in range(3):
                with counting() as sent:
                    for _micro in range(micro):
                        model(torch.ones(32, SIZE).requires_grad_()).sum().backward()
                    optimizer.step()
                counts.append(sent["reduces"])
            with counting() as sent, torch.no_grad():
                model(torch.ones(32, SIZE))
            found[recipe, pairs, micro] = counts, sent["reduces"]
    return found


class Pair:
    """A model on ranks, by columns, and the same in one process; the largest weights are all on the last rank."""

    def __init__(self, optimizer: Optimizer) -> None:
        torch.manual_seed(3)
        self.models = list[Any]()
        for _ in range(2):
            model: Any = nn.Sequential(*(nn.Linear(*sizes, bias=False) for sizes in pairwise(WIDTHS)))
            with torch.no_grad():
                for layer in model:
                    layer.weight.copy_(torch.logspace(-2, 0, layer.weight.numel()).view_as(layer.weight))
            octavo.convert(model, "tensorwise")
            self.models.append(model)
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        styles = {str(index): ColwiseParallel(output_layouts=Replicate()) for index in range(len(WIDTHS) - 1)}
        parallelize_module(self.models[0], mesh, styles)  # type: ignore[arg-type] # a dictionary is invariant
        self.optimizers = [optimizer(model.parameters()) for model in self.models]

    def passes(self, *, learning: bool = True) -> bool:
        """Run a pass of both; return whether their outputs are equal bit for bit."""
        x = torch.linspace(-1, 1, 8 * SIZE).view(8, SIZE)
        with torch.set_grad_enabled(learning):
            one, other = (model(x) for model in self.models)
        if learning:
            one.sum().backward()
            other.sum().backward()
        return torch.equal(one, other)

    def step(self) -> bool:
        """Run a step of two micro-batches, and make the same update to both models, whatever the order of sums."""
        same = self.passes() and self.passes()
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            for weight in model.parameters():
                weight.grad = -weight.detach()
            optimizer.step()
            optimizer.zero_grad()
        return same

    def write(self, change: Callable[[Any, Tensor], object]) -> None:
        for model in self.models:
            with torch.no_grad():
                for weight in model.parameters():
                    change(model, weight)


def counted(_: Any, weight: Tensor) -> None:
    weight.mul_(5)


def uncounted(_: Any, weight: Tensor) -> None:
    weight.data.mul_(5)


def through_data(pair: Pair) -> list[bool]:
    """Averaged weights that an evaluation swaps in and out."""
    found = [pair.step(), pair.step()]
    pair.write(uncounted)
    found.append(pair.passes(learning=False))
    pair.write(lambda _, weight: weight.data.mul_(0.1))
    return [*found, pair.step(), pair.step()]


def later_layers(pair: Pair) -> list[bool]:
    """Averaged weights that an evaluation of all layers but the first swaps in and out."""
    found = [pair.step(), pair.step(), pair.passes()]
    pair.write(uncounted)
    x = torch.linspace(-1, 1, 8 * WIDTHS[1]).view(8, WIDTHS[1])
    with torch.no_grad():
        one, other = (model[1:](x) for model in pair.models)
    found.append(torch.equal(one, other))
    pair.write(lambda _, weight: weight.data.mul_(0.1))
    return [*found, pair.passes(), pair.step()]


def between_micro_batches(pair: Pair) -> list[bool]:
    found = [pair.step(), pair.step(), pair.passes()]
    pair.write(counted)
    return [*found, pair.passes(), pair.step()]


def told(pair: Pair) -> list[bool]:
    """Writes that nothing counts, after which the user calls update_scales."""
    found = [pair.step(), pair.step(), pair.passes()]
    pair.write(uncounted)
    for model in pair.models:
        octavo.update_scales(model)
    return [*found, pair.passes()]


def loaded(pair: Pair) -> list[bool]:
    found = [pair.step(), pair.step()]
    for assign in (False, True, True):  # the last two parameters have the same version
        for model in pair.models:
            state = {name: (value.detach() * 7).clone() for name, value in model.state_dict().items()}
            model.load_state_dict(state, assign=assign)
        found += [pair.passes(), pair.passes()]
    return found


def frozen_and_loaded(pair: Pair) -> list[bool]:
    """New frozen weights, of the version of those before, beside weights that an optimizer holds."""
    for model in pair.models:
        model[0].weight.requires_grad_(False)
    found = [pair.step(), pair.step()]
    for _ in range(3):
        for model in pair.models:
            state = {"0.weight": (model[0].weight.detach() * 7).clone()}
            model.load_state_dict(state, strict=False, assign=True)
        found.append(pair.passes())
    return found


def cast_to_bfloat16(pair: Pair) -> list[bool]:
    found = [pair.step(), pair.step()]
    for model in pair.models:
        model.to(torch.bfloat16)
        model.register_forward_pre_hook(lambda _, args: (args[0].to(torch.bfloat16),))
    return [*found, pair.passes(), pair.step(), pair.step()]


def by_hand(pair: Pair) -> list[bool]:
    """Updates of weights that no optimizer holds."""
    pair.optimizers = []
    found = list[bool]()
    for _ in range(3):
        found += [pair.passes(), pair.passes()]
        pair.write(uncounted)
    return found


def restored(pair: Pair) -> list[bool]:
    """Layers taken out of the model, and one that is converted again."""
    found = [pair.step(), pair.step()]
    for model in pair.models:
        octavo.restore(model[1])
        octavo.convert(model[2], "tensorwise")
    return [*found, pair.step(), pair.step()]


def weights_written(_rank: int, _: Path) -> Any:
    """Whether each pass has the bits of one process, by what is written and by the optimizer."""
    sgd: Optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.5)  # noqa: E731
    fused: Optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=0.5, fused=True)  # noqa: E731
    written = (through_data, later_layers, between_micro_batches, told, by_hand)
    replaced = (loaded, frozen_and_loaded, cast_to_bfloat16, restored)
    found = {case.__name__: case(Pair(sgd)) for case in (*written, *replaced)}
    return found | {"fused": [pair.step() for pair in [Pair(fused)] for _ in range(3)]}


def rows_written(_rank: int, _: Path) -> Any:
    """Operands of weights by row that are not those of casting the whole weight, after writes of each kind."""
    model, found = alternating("rowwise", 1), dict[str, list[str]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    group = model[0].weight.device_mesh.get_group()

    def passes(name: str, *, change: float = 1.0) -> None:
        for weight in model.parameters():
            weight.data.mul_(change)
        weights = [layer.weight.detach().full_tensor() for layer in model]
        with recorded_operands() as operands:
            model(torch.ones(32, SIZE, requires_grad=True)).sum().backward()
        found[name] = unlike_whole(zip(model, "NK", weights, strict=True), operands, group)

    for step in range(2):
        passes(f"step {step}")
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(5)
    passes("counted")
    with torch.no_grad():
        model(torch.ones(32, SIZE))
    passes("after an evaluation", change=0.1)
    octavo.update_scales(model)
    passes("told", change=3.0)
    return found


class Loop:
    """A training loop that refers to itself, so that only garbage collection frees its optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.itself = optimizer, self


def optimizers_dropped(rank: int, _: Path) -> list[list[int]]:
    """All-reduces of steps of an optimizer over some layers, after one over all; which ranks have collected that."""
    found = []
    for collecting in ((), (0,), (0, 1)):
        gc.disable()
        model, counts = alternating("tensorwise", 1), list[int]()
        loop = Loop(torch.optim.SGD(model.parameters(), lr=1e-3))
        for step in range(4):
            if step == 2:
                loop = Loop(torch.optim.SGD(model[1].parameters(), lr=1e-3))
                if rank in collecting:
                    gc.collect()
            with counting() as sent:
                for _micro in range(2):
                    model(torch.ones(32, SIZE).requires_grad_()).sum().backward()
                loop.optimizer.step()
            counts.append(sent["reduces"])
        gc.enable()
        found.append(counts)
    return found

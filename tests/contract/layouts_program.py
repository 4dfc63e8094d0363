"""One of several ranks that train by DDP, FSDP2 or HSDP: ``python -m tests.contract.layouts_program FOLDER RANKS``.

The truth is one process that computes all ranks' micro-batches, which every rank runs by itself. After each backward
pass gradients are replaced by a function of the weights, so that these stay equal whatever the order of sums.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import octavo
from octavo.numerics import QuantizedTensor
from octavo.parallel import gather_in_fp8
from tests.contract.gathered_weights_training import build, shard
from tests.contract.rank_processes import Checks, named, run_ranks
from tests.contract.tensor_parallel_layers import recorded_operands

RECIPES = octavo.recipes.names()
STEPS = 3


def batches_of(rank: int) -> list[Tensor]:
    """A micro-batch for each step; no rank has the largest amax in all steps."""
    generator = torch.Generator().manual_seed(30 + rank)
    return [torch.randn(40, 24, generator=generator) * 4.0 ** ((rank + step) % 3) for step in range(STEPS)]


def own(batches_of: Callable[[int], list[Tensor]]) -> list[list[Tensor]]:
    """This rank's micro-batches by step."""
    return [[batch] for batch in batches_of(distributed.get_rank())]


def together(batches_of: Callable[[int], list[Tensor]]) -> list[list[Tensor]]:
    """All ranks' micro-batches by step."""
    return [list(step) for step in zip(*map(batches_of, range(distributed.get_world_size())), strict=True)]


class Step(NamedTuple):
    """What each micro-batch of a step multiplied, its loss and its gradients; on ranks, the averages of all."""

    operands: list[list[tuple[Any, Any]]]
    losses: list[float]
    gradients: list[list[Tensor]]


def train(model: nn.Module, batches: Iterable[list[Tensor]]) -> tuple[list[Step], dict[str, Tensor]]:
    """Steps, and the scaling state after them."""
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer, steps = torch.optim.SGD(parameters, lr=1e-2), []
    for micro_batches in batches:
        step = Step([], [], [])
        for batch in micro_batches:
            with recorded_operands() as operands:
                loss = model(batch).square().mean()
                loss.backward()
            step.operands.append(operands)
            step.losses.append(loss.item())
            step.gradients.append([gradient_of(each) for each in parameters])
            optimizer.zero_grad()
        steps.append(step)
        for each in parameters:
            each.grad = -each.detach()
        optimizer.step()
        optimizer.zero_grad()
    return steps, octavo.scaling_state(getattr(model, "module", model))


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """A whole gradient; zeros of a parameter that took no part."""
    gradient: Any = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    full: Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return full.clone()


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module, *, codes: bool, copies: int = 1) -> nn.Module:
    ranks = distributed.get_world_size()
    sizes, names = ((copies, ranks // copies), ("copy", "shard")) if copies > 1 else ((ranks,), ("shard",))
    sharded: nn.Module = shard(model, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names))
    if codes:
        gather_in_fp8(sharded)
    return sharded


def layouts(ranks: int) -> dict[str, Callable[[nn.Module], nn.Module]]:
    found: dict[str, Callable[[nn.Module], nn.Module]] = {"DDP": ddp, "FSDP2": partial(fsdp2, codes=False)}
    found["FSDP2, codes"] = partial(fsdp2, codes=True)
    if ranks > 2:
        found["HSDP, codes"] = partial(fsdp2, codes=True, copies=2)
    return found


def same_operand(one: Any, other: Any) -> bool:
    if not isinstance(other, QuantizedTensor):
        return type(one) is type(other) and torch.equal(one, other)
    bits = (each.data.contiguous().view(torch.uint8) for each in (one, other))
    return torch.equal(*bits) and torch.equal(one.scale, other.scale)


def differences(found: tuple[list[Step], Any], truth: tuple[list[Step], Any]) -> Iterator[str]:
    """What is unlike the micro-batch of one process that is this rank's.

    Averages of R gradients are sums in any order, each wrong by at most (R - 1) u of their magnitudes' sum, u = 2^-24,
    and rounded once more by a division.
    """
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    (steps, state), (expected_steps, expected_state) = found, truth
    for index, (step, expected) in enumerate(zip(steps, expected_steps, strict=True)):
        (multiplied,), operands = step.operands, expected.operands[rank]
        if len(multiplied) != len(operands):
            yield f"step {index}: {len(multiplied)} GEMMs"
        for gemm, pairs in enumerate(zip(multiplied, operands, strict=False)):
            if not all(map(same_operand, *pairs)):
                yield f"step {index}: operands of GEMM {gemm}"
        if step.losses != [expected.losses[rank]]:
            yield f"step {index}: loss"
        for number, (gradient, *of_ranks) in enumerate(zip(*step.gradients, *expected.gradients, strict=True)):
            average, magnitude = sum(of_ranks) / ranks, sum(each.abs() for each in of_ranks) / ranks
            if not bool(((gradient - average).abs() <= 2 * ranks * 2.0**-24 * magnitude).all()):
                yield f"step {index}: gradient {number}"
    if state.keys() != expected_state.keys() or not all(
        torch.equal(each, state[key]) for key, each in expected_state.items()
    ):
        yield "scaling state"


def every_layout(_rank: int, _: Path) -> dict[str, list[str]]:
    """Differences by recipe and layout."""
    wraps = layouts(distributed.get_world_size())
    return {f"{recipe}, {name}": each for recipe in RECIPES for name, each in compared(partial(build, recipe), wraps)}


def compared(
    make: Callable[[], nn.Module],
    wraps: Mapping[str, Callable[[nn.Module], nn.Module]],
    batches_of: Callable[[int], list[Tensor]] = batches_of,
) -> Iterator[tuple[str, list[str]]]:
    """Differences of a model from one process, by layout."""
    truth = train(make(), together(batches_of))
    for name, wrap in wraps.items():
        yield name, list(differences(train(wrap(make()), own(batches_of)), truth))


def told_apart(_rank: int, _: Path) -> list[bool]:
    """Whether runs of another recipe, of other data and of each rank's own amaxes differ: the check above can fail."""
    truth = train(build("delayed"), together(batches_of))
    others = [[batch] for batch in batches_of(distributed.get_rank() + 1)]
    alone = build("delayed", amax_group="rank")
    runs = ((build("rowwise"), own(batches_of)), (build("delayed"), others), (alone, own(batches_of)))
    return [any(differences(train(ddp(model), batches), truth)) for model, batches in runs]


def checks(_: int) -> Checks:
    from tests.contract import layouts_use as use

    kinds = (use.mixtures, use.frozen, use.repeated, use.branches, use.evaluating, use.autocasts)
    return named(every_layout, told_apart, *kinds)


if __name__ == "__main__":
    run_ranks(checks)

"""FSDP2 over tensor parallelism on a mesh of 2 x 2: weights gathered as codes, against whole weights."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.numerics import QuantizedTensor
from octavo.parallel import gather_in_fp8
from tests.contract.gathered_weights_training import counting, local
from tests.contract.tensor_parallel_layers import STATIC_SCALE, recorded_operands, unlike_whole

__all__ = ["gathered_codes", "gathered_traffic", "not_gathered", "replicated"]

DYNAMIC = ("tensorwise", "rowwise", "rowwise_hp_grad_weight", "blockwise", "mxfp8", "static", "weight_only")
RECIPES = (*DYNAMIC, "delayed")
SIZES = (64, 768, 160)  # each rank's 384 rows are two chunks, which cut a block of 128; so are 160 rows
STEPS = 3


def mesh(*, hybrid: bool = False) -> Any:
    """Ranks of FSDP2 over those of tensor parallelism; of a hybrid one, two copies of the shards."""
    if hybrid:
        return init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("copies", "shards", "tensor"))
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))


def plain(
    recipe: str,
    *,
    sizes: tuple[int, int, int] = SIZES,
    each: bool = True,
    dtype: torch.dtype = torch.float32,
    hybrid: bool = False,
    **options: Any,
) -> Any:
    """A layer by columns and one by rows, in groups of their own or in one."""
    torch.manual_seed(6)
    first, middle, last = sizes
    layers = nn.Linear(first, middle, bias=False), nn.GELU(), nn.Linear(middle, last, bias=False)
    model: Any = nn.Sequential(*layers).to(dtype)
    with torch.no_grad():
        for index in (0, 2):
            n, k = model[index].weight.shape
            model[index].weight.mul_(torch.logspace(-1, 1, n)[:, None]).mul_(torch.logspace(1, -1, k))
    octavo.convert(model, recipe)
    if octavo.recipes.get(recipe).has_static_input:
        octavo.load_scaling_state(model, dict.fromkeys(octavo.scaling_state(model), STATIC_SCALE))
    ranks = mesh(hybrid=hybrid)
    parallelize_module(model, ranks["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for part in (model[0], model[2], model) if each else (model,):
        fully_shard(part, mesh=ranks["copies", "shards"] if hybrid else ranks["data"], **options)
    return model


def gathering(recipe: str, **options: Any) -> Any:
    model = plain(recipe, **options)
    assert gather_in_fp8(model) == {}
    return model


def batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(20 + distributed.get_rank() // 2)
    for _ in range(2 * STEPS):
        yield torch.randn(32, SIZES[0], generator=generator)


def run(model: Any, *, repeats: bool = False) -> Iterator[tuple[list[Any], dict[str, Tensor]]]:
    """Operands of each micro-batch, and the weights that it multiplied, of three steps of two and an evaluation."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call = partial(checkpoint, model, use_reentrant=False) if repeats else model
    for index, batch in enumerate(batches()):
        weights = {name: each.detach().full_tensor() for name, each in model.named_parameters()}
        with recorded_operands() as operands:
            call(batch.requires_grad_()).square().mean().backward()
        yield operands, weights
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    with recorded_operands() as operands, torch.no_grad():
        model(batch)
    for module in (model, model[0], model[2]):
        if isinstance(module, FSDPModule):
            module.reshard()
    yield operands, {name: each.detach().full_tensor() for name, each in model.named_parameters()}


def same_operands(one: list[Any], other: list[Any]) -> bool:
    pairs = [pair for left, right in zip(one, other, strict=True) for pair in zip(left, right, strict=True)]
    return all(
        torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8)) and torch.equal(a.scale, b.scale)
        if isinstance(a, QuantizedTensor)
        else torch.equal(a, b)
        for a, b in pairs
    )


def compared(recipe: str, *, repeats: bool = False, **options: Any) -> list[str]:
    """What differs from FSDP2's own gather, and from casts of whole weights."""
    models = gathering(recipe, **options), plain(recipe, **options)
    found = list[str]()
    passes = zip(*(run(model, repeats=repeats) for model in models), strict=True)
    for index, ((operands, weights), (expected, _)) in enumerate(passes):
        found += [] if same_operands(operands, expected) else [f"{index} operands"]
        if recipe in DYNAMIC and index < 2 * STEPS and not repeats:
            layers = ((models[0][at], divided, weights[f"{at}.weight"]) for at, divided in ((0, "N"), (2, "K")))
            differ = unlike_whole(layers, operands, mesh()["tensor"].get_group())
            found += [f"{index} {each}" for each in differ]
    pairs = [(local(one), local(other)) for one, other in zip(*(model.parameters() for model in models), strict=True)]
    one, other = (octavo.scaling_state(model) for model in models)
    same = all(torch.equal(*pair) for pair in (*pairs, *((one[key], other[key]) for key in other)))
    return found if same else [*found, "weights or scaling state"]


def gathered_codes(_rank: int, _: Path) -> Any:
    """Differences by recipe; of two recipes also in one group, kept after forward, and with a repeated forward."""
    found = {recipe: compared(recipe) for recipe in RECIPES}
    for recipe in ("rowwise", "mxfp8"):
        found[f"{recipe} together"] = compared(recipe, each=False)
        found[f"{recipe} kept"] = compared(recipe, reshard_after_forward=False)
        found[f"{recipe} repeated"] = compared(recipe, repeats=True)
    for recipe in ("tensorwise", "rowwise", "blockwise"):
        found[f"{recipe} hybrid"] = compared(recipe, hybrid=True)
    return found


def gathered_traffic(_rank: int, _: Path) -> Any:
    """Bytes gathered and all-reduces of the second step, of two micro-batches; "bf16" gathers bfloat16 weights.

    Two recipes are left out, which multiply the weight's values in backward.
    """
    found = {}
    for recipe in ("bf16", *(each for each in RECIPES if each not in ("static", "weight_only"))):
        make = plain if recipe == "bf16" else gathering
        model = make(recipe, sizes=(512, 768, 512), dtype=torch.bfloat16, reshard_after_forward=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _step in range(2):
            with counting() as counts:
                for _micro in range(2):
                    model(torch.randn(32, 512, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
                optimizer.step()
        found[recipe] = counts
    return found


def replicated(_rank: int, _: Path) -> Any:
    """Where every rank of tensor parallelism has the whole weight: whether codes equal values, and ratios of bytes."""
    found = {}
    for recipe in ("tensorwise", "rowwise", "delayed"):
        results, sent = [], []
        for gathers in (True, False):
            torch.manual_seed(6)
            model: Any = nn.Sequential(nn.Linear(SIZES[0], SIZES[2], bias=False))
            octavo.convert(model, recipe)
            distribute_module(model[0], mesh()["tensor"], None, _from_plain, _to_plain)
            for part in (model[0], model):
                fully_shard(part, mesh=mesh()["data"])
            assert not gathers or gather_in_fp8(model) == {}
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with counting() as counts, recorded_operands() as operands:
                for batch in batches():
                    model(batch.requires_grad_()).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            results.append(operands)
            sent.append(counts["bytes"])
        found[recipe] = same_operands(*results), sent[0] / sent[1]
    return found


def _from_plain(_: nn.Module, inputs: Any, ranks: Any) -> Any:
    return DTensor.from_local(inputs[0], ranks, [Replicate()])


def _to_plain(_: nn.Module, output: Any, __: Any) -> Any:
    return output.to_local()


def not_gathered(_rank: int, _: Path) -> Any:
    """Reasons of weights that are gathered in high precision; torch's reduction of gradients refuses an empty slice."""
    model, ranks = nn.Sequential(nn.Linear(16, 1), nn.Linear(1, 16)), mesh()
    octavo.convert(model, "tensorwise")
    parallelize_module(
        model, ranks["tensor"], {"0": ColwiseParallel(output_layouts=Replicate()), "1": ColwiseParallel()}
    )
    for part in (*model, model):
        fully_shard(part, mesh=ranks["data"])
    left = gather_in_fp8(model)
    with torch.no_grad():
        model(torch.ones(4, 16))
    return left

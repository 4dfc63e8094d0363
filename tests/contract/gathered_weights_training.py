"""Models, training and comparison for the checks of tests/contract/gathered_weights_program.py."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import octavo
from octavo.parallel import gather_in_fp8

__all__ = [
    "RECIPES",
    "as_bytes",
    "batches",
    "build",
    "compared",
    "counting",
    "difference",
    "fuse",
    "local",
    "shard",
    "sharded",
    "train",
    "whole",
]

RECIPES = ("tensorwise", "delayed", "rowwise", "rowwise_hp_grad_weight", "blockwise", "mxfp8", "static")
STEPS = 3
STATIC_SCALE = torch.tensor(0.02)


def build(recipe: str, *, sizes: tuple[int, ...] = (24, 33, 150, 24), **options: Any) -> Any:
    """A model whose rows ranks cannot share equally, and whose shards cut blocks of 128 rows and of 32."""
    torch.manual_seed(5)
    layers = [part for k, n in pairwise(sizes) for part in (nn.Linear(k, n), nn.GELU())]
    model = nn.Sequential(*layers[:-1])
    octavo.convert(model, recipe, **options)
    if octavo.recipes.get(recipe).has_static_input:
        octavo.load_scaling_state(model, dict.fromkeys(octavo.scaling_state(model), STATIC_SCALE))
    return model


def shard(model: nn.Module, *, each: bool = True, mesh: Any = None, **options: Any) -> Any:
    """``fully_shard`` with a group for each layer, which is gathered anew for backward, or with the root's alone."""
    mesh = mesh or init_device_mesh("cpu", (distributed.get_world_size(),))
    if each:
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def sharded(
    recipe: str, *, sizes: tuple[int, ...] = (24, 33, 150, 24), each: bool = True, mesh: Any = None, **options: Any
) -> Any:
    return shard(build(recipe, sizes=sizes), each=each, mesh=mesh, **options)


def fuse(recipe: str) -> Any:
    """octavo's fused modules, each in a group of its own."""
    torch.manual_seed(1)
    parts = (
        octavo.nn.TransformerLayer(24, 48, 2, recipe=recipe),
        octavo.nn.LayerNormMLP(24, 48, recipe=recipe),
        octavo.nn.LayerNormLinear(24, 24, recipe=recipe),
    )
    model, mesh = nn.Sequential(*parts), init_device_mesh("cpu", (distributed.get_world_size(),))
    for part in model:
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def batches(rank: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(10 + rank)
    for _ in range(STEPS):
        yield torch.randn(40, 24, generator=generator)


momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def step_once(model: Any, batch: Tensor, _: int) -> list[float]:
    """A step's forward and backward pass, and its losses."""
    loss = model(batch).square().mean()
    loss.backward()
    return [loss.item()]


def train(
    model: Any,
    rank: int,
    *,
    optimizer: Callable[..., Any] = momentum,
    run: Callable[[Any, Tensor, int], list[float]] = step_once,
    fused: bool = False,
) -> dict[str, Any]:
    """Losses, gradients, weights and scaling state of a few steps with clipped gradients."""
    trained = [each for each in model.parameters() if each.requires_grad]
    steps = optimizer(trained)
    losses, grads = list[float](), list[Tensor]()
    for index, batch in enumerate(batches(rank)):
        losses += run(model, batch[None] if fused else batch, index)
        grads += [whole(each.grad) for each in trained if each.grad is not None]
        nn.utils.clip_grad_norm_(trained, 0.5)
        steps.step()
        steps.zero_grad()
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    weights = [whole(each) for each in model.parameters()]
    return {"losses": losses, "grads": grads, "weights": weights, "state": octavo.scaling_state(model)}


def whole(tensor: Any) -> Tensor:
    gathered: Tensor = tensor.detach().full_tensor()
    return gathered.clone()


def local(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)


def as_bytes(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.uint8)


def difference(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of the results that are not equal bit for bit."""
    assert one["losses"][0] != one["losses"][-1]
    found = [] if one["losses"] == other["losses"] else ["losses"]
    for name in ("grads", "weights"):
        assert len(one[name]) == len(other[name]) > 0
        found += [] if all(map(torch.equal, one[name], other[name])) else [name]
    same_keys = one["state"].keys() == other["state"].keys()
    if not same_keys or not all(torch.equal(value, other["state"][key]) for key, value in one["state"].items()):
        found.append("state")
    return found


def compared(rank: int, make: Callable[[], Any], **options: Any) -> list[str]:
    """Differences of training with gathered codes from training under FSDP2 alone."""
    plain, gathering = make(), make()
    left = gather_in_fp8(gathering)
    assert not left, left
    with counting() as sent:
        expected = train(plain, rank, **options)
    with counting() as sent_as_codes:
        found = train(gathering, rank, **options)
    assert sent_as_codes["bytes"] <= sent["bytes"]
    return difference(expected, found)


def gather_name() -> str:
    """The function that gathers into one tensor, by its name in this release of torch."""
    return "all_gather_single" if hasattr(distributed, "all_gather_single") else "all_gather_into_tensor"


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Bytes that this rank sends into all-gathers, and the number of all-reduces."""
    counts = {"bytes": 0, "reduces": 0}
    name = gather_name()
    gather, reduce = getattr(distributed, name), distributed.all_reduce

    def gathering(output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        counts["bytes"] += input_tensor.nbytes
        return gather(output_tensor, input_tensor, **options)

    def reducing(*args: Any, **options: Any) -> Any:
        counts["reduces"] += 1
        return reduce(*args, **options)

    with mock.patch.object(distributed, name, gathering), mock.patch.object(distributed, "all_reduce", reducing):
        yield counts

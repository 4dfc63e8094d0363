"""One of several ranks whose weights FSDP2 gathers as codes: ``python -m tests.contract.gathered_weights_program``.

Arguments: FOLDER RANKS. Training is compared with the same training under FSDP2 alone, which gathers weights in
high precision and equals one process (tests/contract/test_ranks.py).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import octavo
from octavo.errors import ConfigError
from octavo.kernels import cast
from octavo.nn import Linear
from octavo.numerics import AmaxRecord, Scaling
from octavo.parallel import gather_in_fp8
from octavo.parallel.shard_cast import ShardCast
from octavo.parallel.weight_gather import WeightGather
from tests.contract.gathered_weights_training import (
    RECIPES,
    as_bytes,
    batches,
    build,
    compared,
    counting,
    difference,
    fuse,
    local,
    shard,
    sharded,
    train,
    whole,
)
from tests.contract.rank_processes import Checks, named, run_ranks

SIZES = ((1, 5), (3, 40), (33, 24), (130, 200), (300, 136))  # [N, K] of weights
WIDTH = 256
DELAYED_CASTS = set[tuple[bool, bool]]()


def codes(_rank: int, _: Path) -> Any:
    """Recipes and sizes whose codes or scales after the gather are not those of the whole weight."""
    wrong = []
    for recipe in RECIPES:
        for n, k in SIZES:
            torch.manual_seed(n)
            weight = torch.randn(n, k) * torch.logspace(-2, 2, n)[:, None]
            layer = Linear(k, n, bias=False, recipe=recipe)
            with torch.no_grad():
                layer.weight.copy_(weight)
            if not _codes_are_right(layer, weight):
                wrong.append((recipe, n, k))
    return wrong


def _codes_are_right(layer: Any, weight: Tensor) -> bool:
    recipe = layer.recipe
    fully_shard(layer, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)), reshard_after_forward=False)
    gather_in_fp8(layer)
    layer.unshard()
    gather, right = layer.weight_gather, True
    if recipe.grad_input.b is None:  # backward multiplies the values, which then are gathered instead
        return torch.equal(gather.values(weight.dtype), weight)
    for name, spec in (("forward", recipe.output.b), ("backward", recipe.grad_input.b)):
        operand = gather.operand(name, recipe)
        matrix = weight.t() if gather.cast_of(name).transposed else weight
        expected = cast(matrix, spec, record=AmaxRecord()).output
        right = right and torch.equal(as_bytes(operand.data), as_bytes(expected.data))
        right = right and torch.equal(operand.scale, expected.scale)
    return right


def training(rank: int, _: Path) -> Any:
    """Differences by recipe where each layer is gathered twice a step."""
    return {recipe: compared(rank, partial(sharded, recipe)) for recipe in RECIPES}


def training_on_four(rank: int, _: Path) -> Any:
    """The same where the ranks' rows are few, or none."""
    sizes = (24, 3, 150, 24)
    return {recipe: compared(rank, partial(sharded, recipe, sizes=sizes)) for recipe in RECIPES}


def gathered_once(rank: int, _: Path) -> Any:
    """Differences where the root's group stays gathered between forward and backward."""
    return {recipe: compared(rank, partial(sharded, recipe, each=False)) for recipe in RECIPES}


def hybrid(rank: int, _: Path) -> Any:
    """Differences on a 2-D mesh: two replicas of two shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))
    recipes = ("tensorwise", "delayed", "rowwise", "mxfp8")
    return {recipe: compared(rank, partial(sharded, recipe, mesh=mesh)) for recipe in recipes}


def mixed_precision(_rank: int, _: Path) -> Any:
    """Codes of the master weight's float32 values, and the loss of one process that computes in bfloat16 from them."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    model = sharded("tensorwise", mp_policy=policy)
    gather_in_fp8(model)
    before, layer = whole(model[0].weight), model[0]
    layer.unshard()
    operand, dtype = layer.weight_gather.operand("forward", layer.recipe), layer.weight.dtype
    equal = torch.equal(as_bytes(operand.data), as_bytes(octavo.quantize(before, octavo.E4M3).data))
    layer.reshard()  # frees the codes
    truth, batch = build("tensorwise"), next(batches(0))
    for own in (truth[0], truth[2], truth[4]):
        own.bias = nn.Parameter(own.bias.detach().bfloat16())
    loss = model(batch).square().mean()
    loss.backward()
    return {
        "codes": equal,
        "parameter": dtype,
        "gradients": {local(each.grad).dtype for each in model.parameters()},
        "loss": torch.equal(loss, truth(batch.bfloat16()).float().square().mean()),
    }


def optimizers(rank: int, _: Path) -> Any:
    """Differences by implementation of AdamW, and the types of its state's local tensors."""
    make = partial(torch.optim.AdamW, lr=0.01)
    found: dict[str, Any] = {
        name: compared(rank, partial(sharded, "rowwise"), optimizer=partial(make, **{name: True}))
        for name in ("foreach", "fused")
    }
    model = shard(build("rowwise"))
    gather_in_fp8(model)
    model(torch.ones(2, 24)).sum().backward()
    optimizer = make(model.parameters())
    optimizer.step()
    found["state"] = {type(local(value)) for state in optimizer.state.values() for value in state.values()}
    return found


def traffic(_rank: int, _: Path) -> Any:
    """Bytes gathered and all-reduces of the second step, of two micro-batches; "bf16" gathers bfloat16 weights."""
    found = {}
    for recipe in ("bf16", *(name for name in RECIPES if name != "static")):
        torch.manual_seed(0)
        sizes = (WIDTH, WIDTH, WIDTH + 72, WIDTH)  # the third weight's shards cut a block of 128
        layers = [nn.Linear(k, n, bias=False, dtype=torch.bfloat16) for k, n in pairwise(sizes)]
        model = nn.Sequential(*layers)
        octavo.convert(model, recipe)
        shard(model, reshard_after_forward=True)
        if recipe != "bf16":
            gather_in_fp8(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _step in range(2):
            with counting() as counts:
                for _micro in range(2):
                    model(torch.randn(8, WIDTH, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
                optimizer.step()
        found[recipe] = counts
    return found


def modules(rank: int, _: Path) -> Any:
    """Differences of octavo's fused modules."""
    return {recipe: compared(rank, partial(fuse, recipe), fused=True) for recipe in ("rowwise", "delayed")}


class Inner(nn.Module):
    """A model that enters ``octavo.autocast`` itself, after its weights were gathered."""

    def __init__(self, recipe: str | None) -> None:
        super().__init__()
        self.layer, self.recipe = build("rowwise"), recipe

    def forward(self, x: Tensor) -> Tensor:
        with octavo.autocast(self.recipe or "bf16", enabled=self.recipe is not None):
            output: Tensor = self.layer(x)
        return output


def refused(_rank: int, _: Path) -> Any:
    """Messages, and reasons of weights that are gathered in high precision."""
    mesh, found = init_device_mesh("cpu", (2,)), dict[str, Any]()
    for name, recipe in (("other recipe", "mxfp8"), ("high precision", None)):
        inner: Any = fully_shard(Inner(recipe), mesh=mesh)
        gather_in_fp8(inner)
        found[name] = message(partial(inner, torch.ones(2, 24)))
    found["not converted"] = message(lambda: gather_in_fp8(shard(nn.Sequential(nn.Linear(4, 4)))))
    found["not sharded"] = message(lambda: gather_in_fp8(build("rowwise")))
    model = shard(build("rowwise"))
    found["skip"] = message(lambda: gather_in_fp8(model, skip="0"))
    found["skipped"] = gather_in_fp8(model, skip=["0"])
    found["not gathered"] = message(lambda: model[2].weight_gather.operand("forward", model[2].recipe))
    found["blocks"] = gather_in_fp8(shard(build("delayed_te")))
    found["group"] = gather_in_fp8(shard(build("delayed", amax_group="rank")))
    tied: Any = nn.Sequential(nn.Embedding(24, 24), nn.Linear(24, 24), nn.Linear(24, 24, bias=False))
    tied[2].weight = tied[0].weight
    octavo.convert(tied, "rowwise", convert_head=True)
    found["tied"] = gather_in_fp8(fully_shard(tied, mesh=mesh))
    return found


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    return "nothing was said"


def differing_models(rank: int, _: Path) -> Any:
    """Models that train apart are told apart, so that the checks above can fail."""
    return difference(train(shard(build("rowwise")), rank), train(shard(build("tensorwise")), rank))


@contextmanager
def noting_amaxes() -> Iterator[None]:
    """Note of each delayed cast in this block whether an amax of finished steps is there, and whether a reduced one."""
    choose = WeightGather._amax_in_force

    def noting(gather: WeightGather, cast: ShardCast, reduced: Mapping[ShardCast, Tensor]) -> Tensor:
        past = gather.past_amax() if cast.spec.scaling == Scaling.DELAYED else None
        if past is not None:
            DELAYED_CASTS.add((bool(past > 0), cast in reduced))
        return choose(gather, cast, reduced)

    with mock.patch.object(WeightGather, "_amax_in_force", noting):
        yield


def delayed_casts(_rank: int, _: Path) -> Any:
    """What was noted of all delayed casts of the checks before."""
    return DELAYED_CASTS


def checks(ranks: int) -> Checks:
    from tests.contract import gathered_weights_use as use

    if ranks == 4:
        return named(codes, training_on_four, hybrid)
    return named(
        *(codes, training, gathered_once, mixed_precision, optimizers, traffic, modules, refused, differing_models),
        *(use.switched_recipes, use.micro_batches, use.checkpointed, use.frozen, use.loaded, use.offloaded),
        *(use.prefetched, use.unseen_writes, use.compiled, use.kept_for_backward, use.watched, use.evaluating_alone),
        *(use.counted_writes, use.nonfinite_weights, delayed_casts),
    )


if __name__ == "__main__":
    run_ranks(checks, around=noting_amaxes)

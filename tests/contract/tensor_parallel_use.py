"""What is done with a model that ranks share: other orders, options, checkpoints, the doctor."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import octavo
import octavo.doctor
import octavo.nn.shared_input
from octavo.functional import cast_input
from tests.contract.gathered_weights_program import message
from tests.contract.gathered_weights_training import counting
from tests.contract.rank_processes import kept_bytes
from tests.contract.tensor_parallel_models import shared, train, whole

RECIPES = ("tensorwise", "delayed", "rowwise", "mxfp8")


def mesh() -> Any:
    return init_device_mesh("cpu", (distributed.get_world_size(),))


def unequal(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of the results that are not equal bit for bit."""
    found = [] if one["losses"] == other["losses"] else ["losses"]
    for name in ("grads", "state"):
        same = one[name].keys() == other[name].keys()
        found += [] if same and all(map(torch.equal, one[name].values(), other[name].values())) else [name]
    return found


def small(
    recipe: str, *, first: bool = True, bias: bool = True, dtype: torch.dtype = torch.float32, **options: Any
) -> Any:
    """Two layers, of which ranks share the columns and the rows."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(256, 256, bias=bias), nn.GELU(), nn.Linear(256, 256, bias=bias)).to(dtype)
    styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    steps: list[Callable[[], Any]] = [
        lambda: octavo.convert(model, recipe, **options),
        lambda: parallelize_module(model, mesh(), styles),
    ]
    for step in steps if first else reversed(steps):
        step()
    return model


def train_small(model: Any, *, micro: int = 1) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, grads = list[float](), dict[str, Tensor]()
    for step in range(3):
        for _ in range(micro):
            loss = model(torch.randn(16, 256, generator=generator)).square().mean()
            loss.backward()
            losses.append(loss.item())
        grads |= {f"{step} {name}": whole(each.grad) for name, each in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "grads": grads, "state": octavo.scaling_state(model)}


def converted_later(_rank: int, _: Path) -> Any:
    """Differences of a model that is converted after it was parallelized."""
    return {each: unequal(train_small(small(each)), train_small(small(each, first=False))) for each in RECIPES}


class Repeating(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


def checkpointed(_rank: int, _: Path) -> Any:
    """Differences where activation checkpointing repeats the forward pass of each block."""
    found = {}
    for recipe in RECIPES:
        plain, repeating = (shared(recipe, mesh(), sequence=True, loss=True) for _ in range(2))
        repeating.blocks = nn.ModuleList(map(Repeating, repeating.blocks))
        one, other = train(plain), train(repeating)
        other["grads"] = {name.replace("inner.", ""): each for name, each in other["grads"].items()}
        other["state"] = {name.replace("inner.", ""): each for name, each in other["state"].items()}
        found[recipe] = unequal(one, other)
    return found


def shared_inputs(_rank: int, _: Path) -> Any:
    """Differences where each layer casts for itself, and casts of inputs that layers share, of a forward pass."""
    found = {}
    for recipe in ("tensorwise", "rowwise", "mxfp8"):
        sharing, alone = (shared(recipe, mesh(), sequence=True, loss=True) for _ in range(2))
        for layer in alone.modules():
            if isinstance(layer, octavo.nn.Linear):
                layer.shared_input = None
        casts = mock.Mock(side_effect=cast_input)
        with mock.patch.object(octavo.nn.shared_input, "cast_input", casts):
            results = train(sharing), train(alone)
        found[recipe] = unequal(*results), casts.call_count
    return found


def cached(_rank: int, _: Path) -> Any:
    """Differences with cached weights, and amax reductions with and without, of three steps of two micro-batches."""
    found = {}
    for recipe in RECIPES:
        results, reduces = [], []
        for cache in (False, True):
            with counting() as counts:
                results.append(train_small(small(recipe, cache_weights=cache), micro=2))
            reduces.append(counts["reduces"])
        found[recipe] = unequal(*results), reduces
    return found


def saved(_rank: int, folder: Path) -> Any:
    """Names and placements against nn.Linear's; a checkpoint of the ranks, read by one process and by them."""
    model, plain = small("delayed"), small("bf16")
    octavo.restore(plain)
    train_small(model)
    states = model.state_dict(), plain.state_dict()
    assert list(states[0]) == list(states[1])
    alike = [
        type(one) is type(other) is DTensor and one.placements == other.placements
        for one, other in zip(states[0].values(), states[1].values(), strict=True)
    ]
    save({"model": model.state_dict(), "scaling": octavo.scaling_state(model)}, checkpoint_id=folder / "saved")
    found = {"alike": all(alike)}
    single = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    octavo.convert(single, "delayed")
    for name, other in {"ranks": small("delayed"), "one process": single}.items():
        state = {"model": other.state_dict(), "scaling": octavo.scaling_state(other)}
        load(state, checkpoint_id=folder / "saved")
        other.load_state_dict(state["model"])
        octavo.load_scaling_state(other, state["scaling"])
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        found[name] = all(torch.equal(whole(one), whole(each)) for one, each in pairs) and all(
            torch.equal(value, octavo.scaling_state(other)[key]) for key, value in octavo.scaling_state(model).items()
        )
    return found


def restored(_rank: int, _: Path) -> Any:
    """Whether restored layers are nn.Linear's again and compute what parallelized ones do."""
    model = small("tensorwise")
    truth = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    truth.load_state_dict({name: whole(each) for name, each in model.state_dict().items()})
    parallelize_module(truth, mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(1))
    with octavo.autocast(enabled=False):
        inside = torch.equal(model(x), truth(x))
    octavo.restore(model)
    return inside, [type(each) for each in model] == [nn.Linear, nn.GELU, nn.Linear], torch.equal(model(x), truth(x))


def half_precision(_rank: int, _: Path) -> Any:
    """Relative difference of the output of bfloat16 layers, and under torch.autocast, from one process."""
    found = {}
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    for recipe in RECIPES:
        truth = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
        for name, dtype in {"bfloat16": torch.bfloat16, "autocast": torch.float32}.items():
            model = small(recipe, dtype=dtype)
            octavo.restore(truth)
            truth.to(dtype).load_state_dict({name: whole(each) for name, each in model.state_dict().items()})
            octavo.convert(truth, recipe)
            with torch.autocast("cpu", torch.bfloat16, enabled=name == "autocast"):
                one, other = model(x.to(dtype)), truth(x.to(dtype))
            assert one.dtype is other.dtype is torch.bfloat16
            found[recipe, name] = ((one - other).float().norm() / other.float().norm()).item() < 2**-8
    return found


def kept_for_backward(_rank: int, _: Path) -> Any:
    """Bytes kept between the passes, by recipe, at 32 rows of bfloat16."""
    x = torch.randn(32, 256, dtype=torch.bfloat16)
    recipes = ("bf16", *RECIPES)
    return {
        recipe: kept_bytes(small(recipe, bias=False, dtype=torch.bfloat16), x.clone().requires_grad_())
        for recipe in recipes
    }


def rows(_rank: int, _: Path) -> Any:
    """Differences of codes-bearing results of whole weights whose input's rows ranks divide, and a refusal."""
    found = dict[str, Any]()
    for recipe in ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"):
        torch.manual_seed(1)
        truth: Any = nn.Sequential(nn.Linear(256, 256))
        model: Any = nn.Sequential(nn.Linear(256, 256))
        model.load_state_dict(truth.state_dict())
        for name, each in list(model[0].named_parameters()):
            model[0].register_parameter(name, nn.Parameter(distribute_tensor(each.detach(), mesh(), [Replicate()])))
        for each in (model, truth):
            octavo.convert(each, recipe)
        x = torch.randn(256, 256) * torch.logspace(-2, 2, 256)[:, None]
        shard = distribute_tensor(x, mesh(), [Shard(0)]).requires_grad_()
        x.requires_grad_()
        one, other = model(shard), truth(x)
        one.sum().backward()
        other.sum().backward()
        grads = [whole(each[0].weight.grad) for each in (model, truth)]
        assert shard.grad is not None
        assert x.grad is not None
        found[recipe] = torch.equal(whole(one), other) and torch.equal(whole(shard.grad), x.grad)
        found[recipe] = found[recipe] and ((grads[0] - grads[1]).norm() / grads[1].norm()).item() < 1e-6
    found["refused"] = message(lambda: model(distribute_tensor(torch.ones(32, 256), mesh(), [Shard(0)])))
    return found


def compiled(_rank: int, _: Path) -> Any:
    """Differences of a compiled model."""
    model = small("tensorwise")
    model.compile(backend="eager")
    return unequal(train_small(small("tensorwise")), train_small(model))


class Gated(nn.Module):
    """Two gated layers and the one that reads their product, by the names that the doctor looks for."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(64, 128), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Any:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def sampled(*, divided: bool) -> tuple[list[float], Any]:
    """Losses of a watched model, and the watcher's last sample."""
    torch.manual_seed(3)
    model = nn.Sequential(Gated())
    octavo.convert(model, "delayed")
    if divided:
        styles: dict[str, ParallelStyle] = {f"0.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        parallelize_module(model, mesh(), styles | {"0.down_proj": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters())
    watcher = octavo.doctor.watch(model, optimizer, interval=1)
    generator, losses = torch.Generator().manual_seed(4), list[float]()
    for _ in range(2):
        with watcher.step() as notes:
            loss = model(torch.randn(16, 64, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            notes.loss = loss
        losses.append(loss.item())
    assert not watcher.findings()
    return losses, watcher.samples[-1]


def watched(_rank: int, _: Path) -> Any:
    """Numbers of the doctor's sample that are unlike those of one process."""
    (losses, sample), (expected_losses, expected) = (sampled(divided=each) for each in (True, False))
    assert sample.casts.keys() == expected.casts.keys()
    assert len(sample.parameters) == 3
    pairs = {name: (one, expected.parameters[name]) for name, one in sample.parameters.items()}
    pairs |= {"losses": (losses, expected_losses)}
    pairs |= {"alignment": (list(sample.modules["alignment"].values()), list(expected.modules["alignment"].values()))}
    return [name for name, (one, other) in pairs.items() if not np.allclose(one, other, rtol=1e-2)]


def inferred(_rank: int, _: Path) -> bool:
    """Whether a model made in inference mode, whose writes torch does not count, reads its weight as it is now."""
    x = torch.ones(8, 256)
    with torch.inference_mode():
        model, other = small("tensorwise"), small("tensorwise")
        model(x)
        for each in (model, other):
            each[0].weight.mul_(3)
        return torch.equal(whole(model(x)), whole(other(x)))


def not_done(_rank: int, _: Path) -> Any:
    """Messages of what is not done with layers that ranks share."""
    found = {}
    model: Any = nn.Sequential(nn.Linear(256, 256)).requires_grad_(False)
    octavo.convert(model, "tensorwise", frozen="fp8")
    found["codes"] = message(lambda: parallelize_module(model, mesh(), {"0": RowwiseParallel()}))
    codes = DTensor.from_local(model[0].weight_codes.detach(), mesh(), [Shard(0)])
    stored = partial(model[0].register_parameter, "weight_codes", nn.Parameter(codes, requires_grad=False))
    found["rows of codes"] = message(stored)
    other = small("tensorwise").requires_grad_(False)
    found["stored later"] = str(octavo.convert(other, "tensorwise", frozen="fp8").not_stored)
    found["quantize"] = message(lambda: octavo.quantize(other[0].weight, octavo.E4M3))
    tuned = small("tensorwise")
    octavo.restore(tuned)
    octavo.prepare_qat(tuned, "tensorwise")
    found["qat"] = message(lambda: tuned(torch.ones(2, 256)))
    return found

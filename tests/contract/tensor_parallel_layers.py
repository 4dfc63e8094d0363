"""One layer that ranks share, against the same layer in one process: operands of all GEMMs, bit for bit."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import octavo
import octavo.functional.linear
from octavo.functional.saved_operands import quantize_operand
from octavo.numerics import QuantizedTensor
from tests.contract.gathered_weights_program import message
from tests.contract.gathered_weights_training import counting, local

__all__ = [
    "GEMMS",
    "RECIPES",
    "STATIC_SCALE",
    "codes",
    "copied",
    "operand_difference",
    "recorded_operands",
    "reductions",
    "refused",
    "unequal_slices",
    "uneven",
    "unlike_whole",
]

RECIPES = (
    *("tensorwise", "delayed", "delayed_te", "article", "rowwise", "rowwise_hp_grad_weight", "blockwise", "mxfp8"),
    *("static", "weight_only", "bf16"),
)
STATIC_SCALE = torch.tensor(0.02)
RESULTS = ("MN", "MK", "NK")  # dimensions of output, grad_input, grad_weight
GEMMS = (("MK", "NK"), ("MN", "KN"), ("NM", "KM"))  # dimensions of the operands of output, grad_input, grad_weight
STYLES = {"N": ColwiseParallel, "K": RowwiseParallel}
STEPS = 3


def build(recipe: str, *, k: int = 512, n: int = 1024) -> Any:
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Linear(k, n))
    with torch.no_grad():
        model[0].weight.mul_(torch.logspace(-1, 1, n)[:, None]).mul_(torch.logspace(1, -1, k))
    octavo.convert(model, recipe)
    if octavo.recipes.get(recipe).has_static_input:
        octavo.load_scaling_state(model, dict.fromkeys(octavo.scaling_state(model), STATIC_SCALE))
    return model


def copied(operand: Any) -> Any:
    if isinstance(operand, QuantizedTensor):
        return replace(operand, data=operand.data.clone(), scale=operand.scale.clone())
    return operand.detach().clone()


@contextmanager
def recorded_operands() -> Iterator[list[tuple[Any, Any]]]:
    """The operands of the GEMMs that octavo's layers run meanwhile."""
    operands: list[tuple[Any, Any]] = []
    multiply = octavo.functional.linear.multiply

    def recording(a: Any, b: Any, *args: Any, **options: Any) -> Tensor:
        operands.append((copied(a), copied(b)))
        return multiply(a, b, *args, **options)

    with mock.patch.object(octavo.functional.linear, "multiply", recording):
        yield operands


def batches(k: int, n: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and gradients of the output, the same on all ranks."""
    generator = torch.Generator().manual_seed(11)
    for _ in range(STEPS):
        x, grad = torch.randn(4, 32, k, generator=generator), torch.randn(4, 32, n, generator=generator)
        yield x * torch.logspace(2, -2, k), grad * torch.logspace(-3, 0, n)


class Step(NamedTuple):
    """What a step of one layer multiplied, and its results by their dimensions; the bias's gradient is "N"."""

    operands: list[tuple[Any, Any]]
    results: dict[str, Tensor]


def run(model: Any, prepare: Callable[[Tensor, str], Tensor], k: int, n: int) -> list[Step]:
    """Operands, output and gradients of a few steps of one layer; ``prepare`` gives a rank its part."""
    layer, found = model[0], list[Step]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for whole, grad in batches(k, n):
        x = prepare(whole, "MK").requires_grad_()
        with recorded_operands() as operands:
            y = model(x)
            y.backward(prepare(grad, "MN"))
        results = {"MN": y.detach(), "MK": x.grad, "NK": local(layer.weight.grad), "N": local(layer.bias.grad)}
        found.append(Step(operands, {name: each.clone() for name, each in results.items()}))
        layer.weight.grad = -layer.weight.detach()  # the same update, whatever the order of sums
        optimizer.step()
        optimizer.zero_grad()
    return found


def sliced(tensor: Tensor, dims: str, divided: str, rank: int, ranks: int) -> Tensor:
    """A rank's part of a tensor whose last two dimensions are ``dims``."""
    if divided not in dims or tensor.ndim < 2:
        return tensor
    dim = dims.index(divided) - 2
    size = tensor.shape[dim]
    if size == 1:
        return tensor
    chunk = -(-size // ranks)  # as torch.chunk: the last ranks may have fewer rows, or none
    return tensor.narrow(dim, min(rank * chunk, size), max(0, min(chunk, size - rank * chunk)))


def operand_difference(one: Any, whole: Any, dims: str, divided: str, group: Any = None) -> bool:
    rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
    if not isinstance(whole, QuantizedTensor):
        return not torch.equal(one, sliced(whole, dims, divided, rank, ranks))
    data = sliced(whole.data.view(torch.uint8), dims, divided, rank, ranks)
    scale = sliced(whole.scale, dims, divided, rank, ranks)
    return not (torch.equal(one.data.contiguous().view(torch.uint8), data) and torch.equal(one.scale, scale))


def unlike_whole(layers: Iterable[tuple[Any, str, Tensor]], operands: list[Any], group: Any) -> list[str]:
    """Weight operands of a training pass that are not those of casting the whole weight.

    Args:
        layers: two, each with the dimension that ranks divide and the whole weight.
        operands: of the pass's six GEMMs.
        group: the ranks that divide the weights.
    """
    found = []
    for index, ((layer, divided, weight), gemms) in enumerate(zip(layers, ((0, 4), (1, 2)), strict=True)):
        recipe = layer.recipe
        casts = ((recipe.output.b, weight, "NK"), (recipe.grad_input.b, weight.t(), "KN"))
        for gemm, (spec, matrix, dims) in zip(gemms, casts, strict=True):
            whole = matrix if spec is None else quantize_operand(matrix, spec)
            if operand_difference(operands[gemm][1], whole, dims, divided, group):
                found.append(f"layer {index} {dims}")
    return found


def values_difference(one: Any, whole: Any, dims: str, divided: str, pair: Any) -> str | None:
    """How one result of a GEMM is unlike that of one process: at all, or, of a sum over ranks, by more than its bound.

    A sum of K products in FP32 is wrong by at most K u of the sum S of their magnitudes, in whatever order, u = 2^-24;
    so are the sums of all ranks together. Two scales round twice on either side, and adding P parts rounds P - 1 times.
    """
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    expected = sliced(whole, dims, divided, rank, ranks)
    left, right = (each.dequantize() if isinstance(each, QuantizedTensor) else each for each in pair)
    if divided in dims and isinstance(pair[0], QuantizedTensor):  # torch's own GEMM may sum slices in another order
        return None if torch.equal(one, expected) else "differs"
    magnitudes = sliced(left.double().abs() @ right.double().abs().t(), dims, divided, rank, ranks)
    bound = (2 * left.shape[1] + 4 + ranks + 1) * 2.0**-24 * magnitudes
    return None if bool(((one - expected).flatten(0, -2).abs() <= bound).all()) else "exceeds its bound"


def differences(recipe: str, divided: str, k: int, n: int) -> list[str]:
    """What differs between one layer on all ranks and in one process."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    whole, model = build(recipe, k=k, n=n), build(recipe, k=k, n=n)
    truth = run(whole, lambda tensor, _: tensor.clone(), k, n)
    parallelize_module(model, init_device_mesh("cpu", (ranks,)), {"0": STYLES[divided]()})
    shared = run(model, lambda tensor, dims: sliced(tensor, dims, divided, rank, ranks).clone(), k, n)
    found = []
    for step, (one, expected) in enumerate(zip(shared, truth, strict=True)):
        assert len(one.operands) == len(expected.operands) == (0 if recipe == "bf16" else 3)
        for gemm, (pair, wholes) in enumerate(zip(one.operands, expected.operands, strict=True)):
            for side, (own, operand) in enumerate(zip(pair, wholes, strict=True)):
                if operand_difference(own, operand, GEMMS[gemm][side], divided):
                    found.append(f"step {step} gemm {gemm} operand {side}")
        for dims, pair in zip(RESULTS, expected.operands, strict=False):
            how = values_difference(one.results[dims], expected.results[dims], dims, divided, pair)
            found += [] if how is None else [f"step {step} {dims} {how}"]
        bias = expected.results["N"]
        part = sliced(bias[None], "MN", divided, rank, ranks)[0]
        same = torch.allclose(one.results["N"], part, rtol=0, atol=1e-6 * bias.abs().max().item())
        found += [] if same else [f"step {step} gradient of the bias"]
    state, expected_state = octavo.scaling_state(model), octavo.scaling_state(whole)
    same = all(torch.equal(value, expected_state[key]) for key, value in state.items())
    return found + ([] if same and state.keys() == expected_state.keys() else ["scaling state"])


def codes(_rank: int, _: Path) -> Any:
    """Differences of layers whose columns or rows ranks share, by recipe."""
    k = 128 * distributed.get_world_size()
    return {f"{recipe} {divided}": differences(recipe, divided, k, 512) for recipe in RECIPES for divided in STYLES}


def uneven(_rank: int, _: Path) -> Any:
    """Differences where the ranks' columns are not equally many, or none."""
    recipes = ("tensorwise", "delayed", "rowwise", "rowwise_hp_grad_weight")
    return {f"{recipe} {n}": differences(recipe, "N", 40, n) for recipe in recipes for n in (33, 5)}


def unequal_slices(_rank: int, _: Path) -> Any:
    """Differences of an MLP whose ranks' channels are not equally many, and what is said of plain tensors between."""
    mesh, x = init_device_mesh("cpu", (distributed.get_world_size(),)), torch.randn(8, 24)
    distributed.broadcast(x, 0)
    found = {}
    for recipe in ("tensorwise", "delayed", "rowwise"):
        outputs = list[Any]()
        for style in (None, ColwiseParallel(use_local_output=False), ColwiseParallel()):
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(24, 50), nn.GELU(), nn.Linear(50, 24))
            octavo.convert(model, recipe)
            if style is not None:
                parallelize_module(model, mesh, {"0": style, "2": RowwiseParallel()})
            outputs.append(message(partial(model, x)) if style and style.use_local_output else model(x))
        whole, shared, said = outputs
        found[recipe] = torch.allclose(shared, whole, rtol=0, atol=1e-6), said
    return found


def refused(_rank: int, _: Path) -> Any:
    """Messages of layers that ranks cannot share."""
    mesh = init_device_mesh("cpu", (2,))
    found = dict[str, str]()
    for name, options in {"columns": {"n": 384}, "rows": {"k": 320, "n": 256}, "few": {"n": 160}}.items():
        own = build("blockwise", **options)
        plan: dict[str, ParallelStyle] = {"0": RowwiseParallel() if name == "rows" else ColwiseParallel()}
        found[name] = message(partial(parallelize_module, own, mesh, plan))
        assert type(own[0].weight) is nn.Parameter
    model: Any = nn.Sequential(nn.Linear(64, 96))
    parallelize_module(model, mesh, {"0": ColwiseParallel()})
    found["converted later"] = message(lambda: octavo.convert(model, "blockwise"))
    octavo.convert(model, "rowwise")
    with octavo.autocast("mxfp8"):
        found["autocast"] = message(lambda: model(torch.ones(2, 64)))
    model = nn.Sequential(nn.Linear(64, 96))
    octavo.convert(model, "delayed", amax_group="rank")
    found["group"] = message(lambda: parallelize_module(model, mesh, {"0": ColwiseParallel()}))
    model = build("rowwise", k=64, n=64)
    parallelize_module(model, mesh, {"0": ColwiseParallel()})
    found["plain input"] = message(lambda: octavo.nn.Linear.forward(model[0], torch.ones(2, 64)))
    return found


def reductions(_rank: int, _: Path) -> Any:
    """Number of amax reductions in each step, by recipe and style."""
    found = dict[str, list[int]]()
    for recipe in RECIPES:
        for divided, style in STYLES.items():
            model = build(recipe, k=256, n=512)
            parallelize_module(model, init_device_mesh("cpu", (distributed.get_world_size(),)), {"0": style()})
            optimizer, found[f"{recipe} {divided}"] = torch.optim.SGD(model.parameters(), lr=1e-3), []
            for _step in range(2):
                with counting() as counts:
                    x = torch.ones(4, 256 if divided == "N" else 256 // distributed.get_world_size())
                    model(x.requires_grad_()).sum().backward()
                    optimizer.step()
                found[f"{recipe} {divided}"].append(counts["reduces"])
    return found

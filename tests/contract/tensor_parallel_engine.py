"""Transformer Engine's parallel modes, against the same modules in one process."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

import octavo
import octavo.compat.transformer_engine.pytorch as te
from octavo.compat.transformer_engine.common import recipe as recipes
from octavo.scaling import INPUT
from tests.contract.gathered_weights_program import message
from tests.contract.tensor_parallel_layers import GEMMS, operand_difference, recorded_operands, sliced

K, N, POSITIONS, BATCH = 256, 512, 256, 1
RECIPES = {
    "delayed": recipes.DelayedScaling(amax_history_len=2),
    "current": recipes.Float8CurrentScaling(),
    "blocks": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
}
STEPS = 2
DIVIDED = {"column": "N", "row": "K"}
WIDTH, INNER, HEADS, GROUPS = 128, 256, 8, 4


def part(tensor: Tensor, dim: int) -> Tensor:
    """This rank's part."""
    return tensor.chunk(distributed.get_world_size(), dim)[distributed.get_rank()]


def layers(mode: str, *, sequence: bool) -> tuple[Any, Any]:
    """A layer of one process, and this rank's slice of it."""
    torch.manual_seed(3)
    whole = te.Linear(K, N)
    sizes: dict[str, Any] = {"tp_group": distributed.group.WORLD, "tp_size": 2, "sequence_parallel": sequence}
    own = te.Linear(K, N, parallel_mode=mode, **sizes)
    with torch.no_grad():
        whole.weight.mul_(torch.logspace(-1, 1, N)[:, None])
        whole.bias.normal_()
        own.weight.copy_(part(whole.weight, 0 if mode == "column" else 1))
        own.bias.copy_(part(whole.bias, 0) if mode == "column" else whole.bias)
    return whole, own


def steps(layer: Any, recipe: Any, prepare: Callable[[Tensor, str], Tensor]) -> list[Any]:
    """Operands, and output and gradients by name, of a few steps."""
    found, generator = [], torch.Generator().manual_seed(4)
    for step in range(STEPS):
        x = torch.randn(POSITIONS, BATCH, K, generator=generator) * 2.0**step
        grad = torch.randn(POSITIONS, BATCH, N, generator=generator)
        x, layer.weight.grad, layer.bias.grad = prepare(x, "MK").clone().requires_grad_(), None, None
        with recorded_operands() as operands, te.autocast(recipe=recipe):
            y = layer(x)
            y.backward(prepare(grad, "MN"))
        results = {"MN": y.detach(), "MK": x.grad, "NK": layer.weight.grad, "N": layer.bias.grad}
        found.append((operands, {name: each.clone() for name, each in results.items() if each is not None}))
    return found


def linear(mode: str, recipe: Any, *, sequence: bool) -> list[str]:
    """What differs between a layer of two ranks and of one process."""
    divided, (whole, own) = DIVIDED[mode], layers(mode, sequence=sequence)

    def prepare(tensor: Tensor, dims: str) -> Tensor:
        outside = "MN" if mode == "row" else "MK"  # divided by sequence parallelism
        tensor = sliced(tensor, dims, divided, distributed.get_rank(), 2)
        return part(tensor, 0) if sequence and dims == outside else tensor

    truth, shared, found = steps(whole, recipe, lambda tensor, _: tensor), steps(own, recipe, prepare), []
    for step, ((operands, results), (wholes, expected)) in enumerate(zip(shared, truth, strict=True)):
        assert len(operands) == len(wholes) == 3
        for gemm, (pair, both) in enumerate(zip(operands, wholes, strict=True)):
            for side, (one, other) in enumerate(zip(pair, both, strict=True)):
                if operand_difference(one, other, GEMMS[gemm][side], divided):
                    found.append(f"step {step} gemm {gemm} operand {side}")
        expected["N"] = part(expected["N"], 0) if mode == "column" else expected["N"]
        for dims in ("MN", "MK", "NK"):
            expected[dims] = prepare(expected[dims], dims)
        for name, value in results.items():
            summed = name in ("MK" if mode == "column" else "MN", "N")
            bound = 1e-5 * expected[name].abs().max() if summed else 0.0
            found += [] if bool(((value - expected[name]).abs() <= bound).all()) else [f"step {step} {name}"]
    return found


def engine_linear(_rank: int, _: Path) -> Any:
    """Differences by recipe, mode and sequence parallelism."""
    return {
        f"{name} {mode} {sequence}": linear(mode, recipe, sequence=sequence)
        for name, recipe in RECIPES.items()
        for mode in DIVIDED
        for sequence in (False, True)
    }


def slice_of(name: str, own: Tensor, whole: Tensor) -> Tensor:
    """This rank's slice of a parameter of :func:`engine_layer`'s module: of its query, key and value heads."""
    if own.shape == whole.shape:
        return whole
    if "qkv" not in name:
        (dim,) = (dim for dim in range(own.ndim) if own.shape[dim] != whole.shape[dim])
        return part(whole, dim)
    head = WIDTH // HEADS
    return torch.cat([part(each, 0) for each in whole.split((HEADS * head, GROUPS * head, GROUPS * head))])


def engine_layer(_rank: int, _: Path) -> Any:
    """Relative differences of a TransformerLayer's output and gradients, by sequence parallelism."""
    found = {}
    for sequence in (False, True):
        torch.manual_seed(5)
        build = partial(te.TransformerLayer, WIDTH, INNER, HEADS, GROUPS, hidden_dropout=0.0, attention_dropout=0.0)
        whole = build()
        own = build(set_parallel_mode=True, tp_size=2, sequence_parallel=sequence)
        own.set_tensor_parallel_group(distributed.group.WORLD)
        with torch.no_grad():
            for (name, slice_), other in zip(own.named_parameters(), whole.parameters(), strict=True):
                slice_.copy_(slice_of(name, slice_, other))
        x, grad = torch.randn(2, 64, 2, WIDTH, generator=torch.Generator().manual_seed(6))
        results: list[dict[str, Any]] = []
        for model, divides in ((whole, False), (own, sequence)):
            given = (part(x, 0) if divides else x).clone().requires_grad_()
            with te.autocast(recipe=RECIPES["mxfp8"]):
                y = model(given)
            y.backward(part(grad, 0) if divides else grad)
            results.append({"y": y.detach(), "x": given.grad} | {name: p.grad for name, p in model.named_parameters()})
        for name, parameter in own.named_parameters():
            if getattr(parameter, "sequence_parallel", False):
                distributed.all_reduce(results[1][name])
        truth, shared = results
        expected = {name: slice_of(name, shared[name], truth[name]) for name in truth if name not in "xy"}
        expected |= {name: part(truth[name], 0) if sequence else truth[name] for name in "xy"}
        found[str(sequence)] = {
            name: ((shared[name] - each).norm() / each.norm()).item() for name, each in expected.items()
        }
    return found


def engine_arguments(_rank: int, _: Path) -> Any:
    """Sentences of arguments that do not fit, and whether ranks keep their own amaxes if the recipe says so."""
    alone = [distributed.new_group([one]) for one in range(2)][distributed.get_rank()]
    without = te.Linear(K, N, parallel_mode="row", tp_size=2)
    _, own = layers("row", sequence=False)
    kept, x = recipes.DelayedScaling(amax_history_len=1, reduce_amax=False), torch.ones(2, K // 2)
    for _step in range(2):
        with te.autocast(recipe=kept):
            own(x * (1.0 + distributed.get_rank())).sum().backward()
    said = [
        message(partial(without, x)),
        message(partial(te.Linear, K, N + 1, parallel_mode="column", tp_size=2)),
        message(partial(without.set_tensor_parallel_group, alone)),
        message(partial(te.Linear, K, N, tp_group=object())),
        message(partial(te.LayerNormMLP, K, N, tp_size=2)),
        message(partial(te.MultiheadAttention, K, 3, tp_size=2, set_parallel_mode=True)),
    ]
    return said, own.linear.amax_history.amax[INPUT].item()  # that of this rank's input


def prepare_zeros(tensor: Tensor, dims: str, *, mode: str, ranks: bool, sequence: bool) -> Tensor:
    """This rank's slice, of the second rank zero; ``ranks`` divide what is whole by sequence parallelism."""
    rank, divided = distributed.get_rank(), DIVIDED[mode]
    tensor = sliced(tensor, dims, divided, rank, 2)
    if divided in dims:
        return tensor * (1 - rank)
    return part(tensor, 0) if ranks and sequence else tensor


def engine_own_amaxes(rank: int, _: Path) -> Any:
    """With ``reduce_amax=False``: whether a slice trains as a layer of its own, by mode and sequence parallelism.

    The second rank's slices of the weight, and of the gradient (by columns) or of the input (by rows), are zero. Then
    two steps with amaxes of all ranks: the newest, by role.
    """
    kept, reduced = (recipes.DelayedScaling(amax_history_len=2, reduce_amax=each) for each in (False, True))
    found = {}
    for mode in DIVIDED:
        for sequence in (False, True):
            _, own = layers(mode, sequence=sequence)
            with torch.no_grad():
                own.weight.mul_(1 - rank)
            alone = te.Linear(own.weight.shape[1], own.weight.shape[0])
            alone.load_state_dict(own.state_dict())
            prepare = partial(prepare_zeros, mode=mode, sequence=sequence)
            pairs = zip(
                steps(own, kept, partial(prepare, ranks=True)),
                steps(alone, kept, partial(prepare, ranks=False)),
                strict=True,
            )
            same = [torch.equal(one["NK"], other["NK"]) for (_, one), (_, other) in pairs]
            state, expected = octavo.scaling_state(own), octavo.scaling_state(alone)
            same += [torch.equal(state[name], expected[name]) for name in expected]
            steps(own, reduced, partial(prepare, ranks=True))
            state = octavo.scaling_state(own)
            newest = {name: value[0].item() for name, value in state.items() if "history" in name}
            found[f"{mode} {sequence}"] = all(same), len(same), newest
    return found


CHECKS: tuple[Callable[[int, Path], Any], ...] = (engine_linear, engine_layer, engine_arguments, engine_own_amaxes)

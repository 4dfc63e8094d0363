"""Layers that share the cast of an input, beside layers that each cast it for themselves: the same bits."""

import copy
import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.functional import saved_operands
from octavo.kernels import cast
from octavo.nn import Linear
from tests.contract.gemm_oracle import recorded_products

K = 32
Change = Callable[[Tensor], Any]


class Branches(nn.Module):
    """Three layers that are given one tensor; ``change`` comes between the first and the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(K, size) for size in (48, 16, 24))

    def forward(self, x: Tensor, change: Change = lambda _: None) -> Tensor:
        first = self.layers[0](x)
        change(x)
        return torch.cat([first, self.layers[1](x), self.layers[2](x)], dim=-1)


def _branches(recipe: str = "tensorwise", *, shared: bool = True) -> Branches:
    model = Branches()
    octavo.convert(model, recipe)
    if octavo.recipes.get(recipe).has_static_input:
        octavo.load_scaling_state(model, dict.fromkeys(octavo.scaling_state(model), torch.tensor(0.02)))
    if not shared:
        for layer in model.layers:
            assert isinstance(layer, Linear)
            layer.shared_input = None
    return model


def _input(rows: int = 64) -> Tensor:
    """An input as it comes from a layer before: computed, and taking a gradient."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, K, generator=generator).requires_grad_() * 1.0


def _distinct_inputs(model: Branches, x: Tensor, change: Change = lambda _: None) -> int:
    """How many casts of inputs the output products of one forward pass multiply."""
    with recorded_products() as products:
        model(x, change)
    assert len(products) == 3
    return len({product.a.data.untyped_storage().data_ptr() for product in products})


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_hp_grad_weight", "blockwise", "mxfp8"])
def test_an_input_of_several_layers_is_cast_once(monkeypatch, recipe):
    found: list[Tensor] = []

    def counting(x: Tensor, *args: Any, **options: Any) -> Any:
        found.append(x)
        return cast(x, *args, **options)

    monkeypatch.setattr(saved_operands, "cast", counting)
    casts = {}
    for shared in (True, False):
        found.clear()
        model, x = _branches(recipe, shared=shared), _input()
        model(x)
        casts[shared] = sum(each.data_ptr() == x.data_ptr() for each in found)
    assert casts == {True: 1, False: 3}


def _step(model: Branches, x: Tensor) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    y = model(leaf * 1.0)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
    gradients = [each.grad for each in (leaf, *model.parameters())]
    counts = [layer.nonfinite_counts for layer in model.layers]
    return [y.detach(), *(each.clone() for each in (*gradients, *counts) if isinstance(each, Tensor))]


@pytest.mark.parametrize("rows", [0, 1, 3, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("recipe", octavo.recipes.names())
def test_sharing_changes_no_bit(recipe, dtype, rows):
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(2)).to(dtype)
    if rows:
        x[0, 0], x[-1, -1] = float("inf"), float("nan")
    found, expected = (_step(_branches(recipe, shared=shared).to(dtype), x) for shared in (True, False))
    assert len(found) == 1 + 7 + 3
    assert all(_same_bits(*pair) for pair in zip(found, expected, strict=True))
    if rows and recipe not in ("bf16", "weight_only"):
        assert [counts[0].item() for counts in found[-3:]] == [2, 2, 2]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("frozen", range(3))
def test_frozen_layers_share_with_trained_ones(frozen):
    results = []
    for shared in (True, False):
        model = _branches("rowwise", shared=shared)
        model.layers[frozen].requires_grad_(False)
        results.append(_step(model, _input()))
    assert all(_same_bits(*pair) for pair in zip(*results, strict=True))


def _replace_values(x: Tensor) -> None:
    x.data = x.data * 2


def _transpose_in_place(x: Tensor) -> None:
    x.data = x.data.t()


CHANGES: dict[str, Change] = {
    "in place": lambda x: x.detach().mul_(2),
    "through a view": lambda x: x.detach()[0].zero_(),
    "other data": _replace_values,
    "the same data transposed": _transpose_in_place,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_changed_is_cast_again(change):
    found, expected = (_branches(shared=shared)(_square(), CHANGES[change]) for shared in (True, False))
    assert torch.equal(found, expected)
    assert not torch.equal(found, _branches()(_square()))
    assert _distinct_inputs(_branches(), _square(), CHANGES[change]) == 2


def _square() -> Tensor:
    return _input(K)


def test_another_tensor_of_the_same_values_or_memory_is_cast_for_itself():
    model, x = _branches(), _input()
    with recorded_products() as products:
        for each in (x, x.view_as(x), x * 1.0, x[:32]):
            model.layers[0](each)
    assert len({product.a.data.untyped_storage().data_ptr() for product in products}) == 4


def test_a_new_tensor_at_a_dead_ones_place_is_cast_for_itself():
    shared, alone = _branches(), _branches(shared=False)
    for step in range(20):
        x = _input() + step
        y = shared(x)
        assert torch.equal(y, alone(x))
        del x, y


def test_another_dtype_of_autocast_or_recipe_is_another_cast():
    model, x = _branches(), _input()
    alone = _branches(shared=False)

    def run(each: Branches) -> list[Tensor]:
        found = [each.layers[0](x)]
        with torch.autocast("cpu", torch.bfloat16):
            found += [each.layers[0](x), each.layers[1](x)]
        with octavo.autocast("rowwise"):
            found += [each.layers[0](x), each.layers[1](x)]
        return found

    with recorded_products() as products:
        found = run(model)
    assert all(_same_bits(*pair) for pair in zip(found, run(alone), strict=True))
    assert len({product.a.data.untyped_storage().data_ptr() for product in products}) == 3


class Latents(nn.Module):
    """A parameter that two layers multiply."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.latents = nn.Parameter(torch.randn(4, K))
        self.branches = _branches()

    def forward(self) -> Tensor:
        return self.branches(self.latents)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("update", ["fused", "data"])
def test_parameter_is_cast_again_after_any_kind_of_write(recipe, update):
    """Fused optimizers and ``.data`` raise no version counter; the last cast may be of the parameter itself."""
    losses: dict[bool, list[float]] = {}
    for shared in (True, False):
        model = Latents()
        model.branches = _branches(recipe, shared=shared)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        losses[shared] = []
        for _ in range(4):
            loss = model().square().mean()
            losses[shared].append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            if update == "fused":
                optimizer.step()
            else:
                model.latents.data.mul_(0.5)
    assert losses[True] == losses[False]
    assert len(set(losses[True])) == 4


def test_another_recipe_on_the_same_dtype_is_another_cast():
    model, alone, x = _branches(), _branches(shared=False), _input()

    def run(each: Branches) -> list[Tensor]:
        found = [each.layers[0](x)]
        with octavo.autocast("rowwise"):
            found += [each.layers[0](x)]
        with octavo.autocast("tensorwise"):
            return [*found, each.layers[1](x)]

    with recorded_products() as products:
        found = run(model)
    assert all(_same_bits(*pair) for pair in zip(found, run(alone), strict=True))
    assert len({product.a.data.untyped_storage().data_ptr() for product in products}) == 3


def _delayed() -> Branches:
    model = _branches("delayed")
    model(_input()).sum().backward()
    octavo.update_scales(model)
    return model


def test_layers_cast_separately_where_inputs_cannot_be_shared():
    """Layers with scales of their own; and where nothing says that an input is unchanged."""
    assert _distinct_inputs(_branches(), _input()) == 1
    assert _distinct_inputs(_delayed(), _input()) == 3
    assert _distinct_inputs(_branches("static"), _input()) == 3
    assert _distinct_inputs(_branches(), _input().detach()) == 3
    with torch.no_grad():
        assert _distinct_inputs(_branches(), _input()) == 3
    with torch.inference_mode():
        assert _distinct_inputs(_branches(), _input()) == 3


def test_codes_go_with_their_input():
    def alive() -> int:
        return sum(type(each) is Tensor and each.dtype is torch.float8_e4m3fn for each in gc.get_objects())

    gc.collect()
    before = alive()
    model, x = _branches(), _input()
    y = model(x)
    assert alive() > before
    del y
    del x
    assert alive() == before
    x = _input()
    y = model(x)
    del x
    y.sum().backward()
    del y
    assert alive() == before


def _kept_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes of the distinct storages of one-byte elements that backward keeps."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.itemsize == 1:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(x)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_backward_keeps_shared_codes_once():
    found = {shared: _kept_bytes(_branches("rowwise", shared=shared), _input()) for shared in (True, False)}
    assert found == {True: 64 * K, False: 3 * 64 * K}


def test_copies_and_pickles_share_among_themselves_alone():
    model = _branches()
    x = _input()
    model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        own = {id(layer.shared_input) for layer in other.layers}
        assert len(own) == 1
        assert own != {id(layer.shared_input) for layer in model.layers}
        assert torch.equal(other(x), model(x))


def test_restored_model_has_no_shared_input():
    model = _branches()
    octavo.restore(model)
    assert not any("shared_input" in vars(layer) for layer in model.layers)


@pytest.mark.long
def test_a_compiled_model_computes_the_same():
    torch.compiler.reset()
    expected = _step(_branches(), _input())
    model = _branches()
    compiled = torch.compile(lambda leaf: model(leaf * 1.0), backend="aot_eager", fullgraph=True)
    leaf = _input().detach().requires_grad_()
    y = compiled(leaf)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
    assert torch.equal(y, expected[0])
    gradients = [each.grad for each in (leaf, *model.parameters()) if each.grad is not None]
    assert all(torch.equal(*pair) for pair in zip(gradients, expected[1:8], strict=True))


def test_threads_with_inputs_of_their_own_do_not_meet():
    model, alone = _branches(), _branches(shared=False)
    inputs = [_input() * factor for factor in (1.0, 3.0, 7.0)]
    expected = [alone(x) for x in inputs]
    wrong: list[int] = []

    def run(index: int) -> None:
        wrong.extend(index for _ in range(50) if not torch.equal(model(inputs[index]), expected[index]))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

"""What backward makes again, as on a GPU, beside what it keeps, as on a CPU: the same bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.formats import E4M3
from octavo.functional import fp8_linear
from octavo.functional import linear as functional
from octavo.nn import Linear
from octavo.nn.fp8_weight import store_weight_as_codes
from octavo.numerics import QuantizedTensor, quantize
from tests.contract.gemm_oracle import assert_same_operand, recorded_products
from tests.recorded_state import recorded_state

RECIPES = [
    name for name in octavo.recipes.names() if octavo.recipes.get(name).output.b is not None and name != "static"
]
Run = Callable[[nn.Module, Tensor], Tensor]


@pytest.fixture
def made_again(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    return lambda again: monkeypatch.setattr(functional, "recasts_weight", lambda *_: again)


def _called(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    return y


def _checkpointed(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(model, x, use_reentrant=False)
    return y


def _training(recipe: str, dtype: torch.dtype, run: Run = _called) -> list[Tensor]:
    """Everything that three steps of two micro-batches compute and leave behind."""
    torch.manual_seed(0)
    model = nn.Sequential(Linear(48, 32, recipe=recipe, dtype=dtype), Linear(32, 16, recipe=recipe, dtype=dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Tensor] = []
    for _ in range(3):
        for _ in range(2):
            x = torch.randn(64, 48, dtype=dtype, requires_grad=True)
            x.data[0, 0] = float("inf")
            y = run(model, x)
            y.backward(torch.randn_like(y))
            found += [y.detach(), _gradient(x)]
        for parameter in model.parameters():
            found.append(_gradient(parameter))
            parameter.grad = _gradient(parameter).nan_to_num(0, 0, 0)
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(tensor.clone() for tensor in recorded_state(model).values())]  # counts and histories


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_weight_that_is_cast_again_changes_no_bit(made_again, recipe, dtype):
    made_again(False)
    expected = _training(recipe, dtype)
    for run in (_called, _checkpointed):
        made_again(True)
        found = _training(recipe, dtype, run)
        assert all(_same_bits(own, wanted) for own, wanted in zip(found, expected, strict=True))


def _gradient(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad.clone()


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def test_the_weight_is_measured_once_and_its_transpose_is_cast_by_that_amax(made_again):
    made_again(True)
    x, weight = torch.randn(6, 24, requires_grad=True), torch.randn(16, 24, requires_grad=True)
    with recorded_products() as products:
        fp8_linear(x, weight, None, octavo.recipes.get("tensorwise")).sum().backward()
    operand = products[1].b
    assert isinstance(operand, QuantizedTensor)
    assert_same_operand(operand, quantize(weight.detach().t(), E4M3))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_codes_of_the_weights_transpose_are_not_kept(made_again, recipe):
    made_again(True)
    layer = Linear(48, 32, recipe=recipe)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(torch.randn(64, 48, requires_grad=True))
    assert any(tensor.data_ptr() == layer.weight.data_ptr() for tensor in kept)
    assert not [tensor for tensor in kept if tensor.itemsize == 1 and tensor.numel() == layer.weight.numel()]


def test_codes_of_a_computed_weight_are_saved(made_again):
    """It would be kept for nothing else; a parameter is there in any case."""
    made_again(True)
    parameter, x = torch.randn(48, 32, requires_grad=True), torch.randn(8, 32, requires_grad=True)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    weight = parameter * 1.0
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        fp8_linear(x, weight, None, octavo.recipes.get("tensorwise"))
    assert [tensor.itemsize for tensor in kept if tensor.numel() == weight.numel()] == [1]


ROWS = (1, 2, 3, 4, 31, 32, 33, 64, 96, 128)


def _kept_bytes(layer: nn.Linear, x: Tensor) -> int:
    """Bytes of the distinct storages that are saved, but for the parameters'."""
    own = {parameter.untyped_storage()._cdata for parameter in layer.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x)
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in own)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
@pytest.mark.parametrize("recipe", octavo.recipes.names())
def test_at_no_number_of_rows_more_is_kept_than_in_bfloat16(recipe, autocast, frozen):
    dtype = torch.float32 if autocast else torch.bfloat16
    layer = Linear(64, 32, bias=False, dtype=dtype, recipe=recipe)
    layer.weight.requires_grad_(not frozen)
    if octavo.recipes.get(recipe).has_static_input:
        layer.input_scale.fill_(0.02)
    for rows in ROWS:
        x = torch.randn(rows, 64, dtype=dtype, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            plain = _kept_bytes(nn.Linear(64, 32, bias=False, dtype=dtype).requires_grad_(not frozen), x)
            own = _kept_bytes(layer, x)
        amaxes = 16 if frozen else 0  # of the weight, and what a delayed step goes by
        assert own <= plain + amaxes, rows


def test_codes_are_saved_if_no_larger_than_the_bfloat16_input():
    """Then the weight is cast once a step: three quantizations."""
    layer = Linear(64, 32, bias=False, dtype=torch.bfloat16)
    found = {}
    for rows in (32, 34):  # one scale each, of input and weight
        with recorded_products() as products:
            layer(torch.randn(rows, 64, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
        weights = [products[0].b, products[1].b]
        found[rows] = len({codes.data.untyped_storage().data_ptr() for codes in weights})
    assert found == {32: 2, 34: 1}


def test_a_weight_changed_before_the_backward_pass_is_refused(made_again):
    made_again(True)
    layer = Linear(48, 32)
    y = layer(torch.randn(64, 48, requires_grad=True))
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_codes_that_outlive_the_call_are_not_made_again(made_again):
    made_again(True)
    layer = Linear(48, 32).requires_grad_(False)
    store_weight_as_codes(layer)
    x = torch.randn(64, 48, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None


def _ready(compile_it: Callable[[nn.Module], Any]) -> Run:
    """Calls what is made of a model that has its histories: a graph makes none."""
    made: dict[nn.Module, Any] = {}

    def run(model: nn.Module, x: Tensor) -> Tensor:
        if model not in made:
            model(torch.ones(1, 48))
            octavo.update_scales(model)
            made[model] = compile_it(model)
        y: Tensor = made[model](x)
        return y

    return run


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
def test_a_compiled_layer_makes_it_again_too(made_again, recipe):
    made_again(True)
    torch.compiler.reset()
    expected = _training(recipe, torch.float32, _ready(lambda model: model))
    found = _training(
        recipe, torch.float32, _ready(lambda model: torch.compile(model, backend="aot_eager", fullgraph=True))
    )
    assert all(_same_bits(own, wanted) for own, wanted in zip(found, expected, strict=True))

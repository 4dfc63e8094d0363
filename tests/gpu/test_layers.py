"""A layer on a GPU beside the same one on the CPU: operands bit for bit, results within a tensor core's bound."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.formats import FP8_FORMATS
from octavo.nn import LayerNormLinear, LayerNormMLP, Linear, TransformerLayer
from octavo.nn.scaling_state import nonfinite_counts, scaling_state, update_scales
from tests.contract.gemm_oracle import Product, assert_product, assert_row_sum, assert_same_operand, recorded_products
from tests.contract.operand_oracle import expected_operand
from tests.contract.test_recipes import DTYPES, FP8_RECIPES, SHAPES, TABLE, assert_weight_only
from tests.contract.test_recipes import _layer as layer_of
from tests.contract.test_recipes import _step as step
from tests.gpu import devices
from tests.gpu.devices import on_cpu
from tests.recorded_state import end_step

pytestmark = pytest.mark.gpu

PRESETS = tuple(octavo.recipes.names())
DELAYED = [name for name in PRESETS if octavo.recipes.get(name).is_delayed]


def twin(layer: Linear) -> Linear:
    return copy.deepcopy(layer).to(devices.DEVICE)


def recorded(layer: Linear, x: Tensor, grad_output: Tensor) -> tuple[list[Product], Tensor]:
    with recorded_products() as products:
        y = step(layer, x, grad_output)
    return products, y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_operands_output_and_gradients(recipe, shape, dtype, monkeypatch):
    # Else cuBLAS adds parts of a BF16 product in BF16, where no row is aligned to 16 bytes.
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False)
    leading, K, N = SHAPES[shape]
    layer = layer_of(recipe, K, N, dtype)
    other = twin(layer)
    x, grad_output = torch.randn(*leading, K).to(dtype), torch.randn(*leading, N, dtype=dtype) * 1e-2
    expected, _ = recorded(layer, x.clone().requires_grad_(), grad_output)
    there = x.to(devices.DEVICE).requires_grad_()
    found, y = recorded(other, there, grad_output.to(devices.DEVICE))
    for own, wanted in zip(found, expected, strict=True):
        assert_same_operand(on_cpu(own.a), on_cpu(wanted.a))
        assert_same_operand(on_cpu(own.b), on_cpu(wanted.b))
    assert there.grad is not None
    assert other.weight.grad is not None
    assert other.bias.grad is not None
    rows, grad_rows = x.reshape(-1, K), grad_output.reshape(-1, N)
    results = (y.detach().reshape(-1, N), there.grad.reshape(-1, K), other.weight.grad)
    left = iter(found)
    for index, (pair, result) in enumerate(zip(TABLE[recipe], results, strict=True)):
        if pair is not None and pair[0] is None:
            operand = expected_operand(pair[1], layer.weight.detach())
            bias = layer.bias.detach() if index == 0 else None
            assert_weight_only(result.cpu(), rows, operand, bias, rounds_product=dtype is torch.bfloat16)
        elif pair is not None:
            assert_within(result, next(left), other.bias.detach() if index == 0 else None)
    if TABLE[recipe][1:] == (None, None):  # gradients in high precision, of the same tensors as the CPU's
        torch.testing.assert_close(other.weight.grad.cpu(), layer.weight.grad, rtol=2e-2, atol=2e-2)
    assert_row_sum(narrow(other.bias.grad.cpu()), grad_rows)
    assert rows.shape[0] == grad_rows.shape[0]


def assert_within(result: Tensor, product: Product, bias: Tensor | None) -> None:
    a, b = on_cpu(product.a), on_cpu(product.b)
    own = None if bias is None else bias.cpu()
    assert_product(narrow(result.cpu()), a, b, own, tensor_core=True)


def narrow(result: Tensor) -> Tensor:
    """float64 layers compute in float32."""
    return result.float() if result.dtype is torch.float64 else result


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("statistic", ["max", "latest", "mean"])
def test_a_delayed_history_is_the_cpus_after_several_steps(statistic, manual):
    recipe = octavo.recipes.get("delayed", history_length=4, statistic=statistic, update_interval=2)
    here = Linear(64, 48, recipe=recipe, manual_scale_updates=manual)
    there = twin(here)
    for number in range(7):
        x, grad = torch.randn(16, 64) * 2.0**number, torch.randn(16, 48) * 3.0**-number
        if number == 3:
            x[0, 0] = float("inf")
        (expected, _), (found, _) = (
            recorded(layer, x.to(device).requires_grad_(), grad.to(device))
            for layer, device in ((here, "cpu"), (there, devices.DEVICE))
        )
        for own, wanted in zip(found, expected, strict=True):
            assert_same_operand(on_cpu(own.a), on_cpu(wanted.a))
            assert_same_operand(on_cpu(own.b), on_cpu(wanted.b))
        if manual:
            update_scales(here)
            update_scales(there)
        else:
            end_step()
        state, same = scaling_state(here), scaling_state(there)
        assert state.keys() == same.keys()
        assert all(torch.equal(state[key], same[key].cpu()) for key in state)
    assert nonfinite_counts(here) == nonfinite_counts(there) != {}


def ready(recipe: str) -> Linear:
    """A layer that has run once, so that kernels are compiled and histories exist."""
    layer = Linear(256, 128, recipe=recipe, manual_scale_updates=octavo.recipes.get(recipe).is_delayed)
    if layer.recipe.has_static_input:
        layer.input_scale.fill_(2.0**-6)
    return layer.to(devices.DEVICE, torch.bfloat16)


def batch(*, broken: bool = False) -> tuple[Tensor, Tensor]:
    x, grad = torch.randn(64, 256), torch.randn(64, 128)
    if broken:
        x[0, 0], x[1, 2], grad[3, 3] = float("nan"), float("inf"), float("-inf")
    return x.to(devices.DEVICE, torch.bfloat16), grad.to(devices.DEVICE, torch.bfloat16)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise"])
def test_between_forward_and_backward_a_layer_keeps_the_codes_of_its_input_alone(recipe):
    layer = ready(recipe)
    x, grad = batch()
    layer(x.requires_grad_()).backward(grad)
    before = torch.cuda.memory_allocated()
    y = layer(x)
    kept = torch.cuda.memory_allocated() - before
    assert y.nbytes + x.numel() <= kept < y.nbytes + x.numel() + layer.weight.numel()
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(grad)


def without_waiting(run: Callable[[], object]) -> None:
    """Raises where Python would wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("recipe", PRESETS)
def test_a_step_counts_what_is_not_finite_and_never_waits(recipe):
    if octavo.recipes.get(recipe).output.a is None:
        pytest.skip("the recipe casts no input, so that it counts none")
    layer = ready(recipe)
    x, grad = batch()
    layer(x.requires_grad_()).backward(grad)
    update_scales(layer)
    x, grad = batch(broken=True)
    x.requires_grad_()
    without_waiting(lambda: layer(x).backward(grad))
    counted = {} if octavo.recipes.get(recipe).grad_input.a is None else {"grad_output": 1}
    assert nonfinite_counts(layer) == {"input": 2} | counted


@pytest.mark.parametrize("recipe", PRESETS)
def test_closing_a_step_never_waits(recipe):
    layer = ready(recipe)
    x, grad = batch()
    layer(x.requires_grad_()).backward(grad)
    without_waiting(lambda: update_scales(layer))


@pytest.mark.parametrize("fmt", FP8_FORMATS[:2], ids=str)
def test_casting_never_waits(fmt):
    x, _ = batch()
    octavo.quantize(x, fmt).dequantize()
    without_waiting(lambda: octavo.quantize(x, fmt).dequantize())


def one_step(module: Callable[[Tensor], Tensor], owner: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    owner.zero_grad()
    y = module(x)
    y.backward(grad)
    assert x.grad is not None
    found = {"y": y.detach(), "x": x.grad}
    return found | {name: p.grad.clone() for name, p in owner.named_parameters() if p.grad is not None}


def assert_alike(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        scale = value.float().abs().max().item()
        torch.testing.assert_close(found[name], value, rtol=1e-2, atol=1e-2 * scale, msg=name)


@pytest.mark.parametrize("recipe", PRESETS)
def test_compiled_without_graph_breaks_it_computes_the_same(recipe):
    torch.compiler.reset()
    eager = ready(recipe)
    traced = copy.deepcopy(eager)
    compiled = torch.compile(traced, fullgraph=True)
    for _ in range(3):
        x, grad = batch()
        assert_alike(one_step(compiled, traced, x, grad), one_step(eager, eager, x, grad))
        update_scales(eager)
        update_scales(traced)
    state, same = scaling_state(eager), scaling_state(traced)
    assert all(torch.equal(state[key], same[key]) for key in state)


@pytest.mark.parametrize("recipe", PRESETS)
def test_a_step_as_a_cuda_graph_computes_the_same(recipe):
    eager = ready(recipe)
    captured = copy.deepcopy(eager)
    x, grad = batch()
    for layer in (eager, captured):  # what happens once, happens before the capture
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                one_step(layer, layer, x, grad)
        torch.cuda.current_stream().wait_stream(side)
        update_scales(layer)
    held, held_grad = x.clone().requires_grad_(), grad.clone()
    captured.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = captured(held)
        y.backward(held_grad)
    for _ in range(3):
        x, grad = batch()
        with torch.no_grad():
            held.copy_(x)
            held_grad.copy_(grad)
            for tensor in (held, *captured.parameters()):
                assert tensor.grad is not None
                tensor.grad.zero_()
        graph.replay()
        found = {"y": y.detach(), "x": held.grad}
        found |= {name: parameter.grad for name, parameter in captured.named_parameters()}
        assert_alike(
            {name: value for name, value in found.items() if value is not None}, one_step(eager, eager, x, grad)
        )
        update_scales(eager)
        update_scales(captured)
    state, same = scaling_state(eager), scaling_state(captured)
    assert all(torch.equal(state[key], same[key]) for key in state)


@pytest.mark.parametrize("recipe", [recipe for recipe in PRESETS if not octavo.recipes.get(recipe).has_static_input])
def test_a_transformer_layer_compiles_whole_and_never_waits(recipe):
    torch.compiler.reset()
    layer = TransformerLayer(
        256,
        512,
        4,
        num_kv_heads=2,
        activation="swiglu",
        normalization="rmsnorm",
        bias=False,
        recipe=recipe,
        device=devices.DEVICE,
        dtype=torch.bfloat16,
    )
    traced = copy.deepcopy(layer)
    x, grad = (torch.randn(2, 64, 256, device=devices.DEVICE, dtype=torch.bfloat16) for _ in range(2))
    wanted = one_step(layer, layer, x, grad)
    found = one_step(torch.compile(traced, fullgraph=True), traced, x, grad)
    for name, value in wanted.items():  # an FP8 rounding decided otherwise moves what follows it
        difference = (found[name].float() - value.float()).norm() / value.float().norm()
        assert difference < 0.1, name
    torch.optim.SGD(layer.parameters(), lr=0.0).step()  # while none is known, weights are read to see updates by hand
    without_waiting(lambda: one_step(layer, layer, x, grad))


FUSED = {
    "norm and linear": lambda recipe: LayerNormLinear(256, 128, recipe=recipe),
    "norm, silu and linear": lambda recipe: LayerNormMLP(256, 512, activation="swiglu", recipe=recipe),
    "norm, gelu and linear": lambda recipe: LayerNormMLP(256, 512, activation="gelu", recipe=recipe),
}


@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
@pytest.mark.parametrize("recipe", [recipe for recipe in PRESETS if not octavo.recipes.get(recipe).has_static_input])
def test_a_fused_layer_computes_what_the_cpus_layers_do(recipe, make):
    """The device's exp is approximate and sums go another way: now and then a code is its neighbour."""
    here = make(recipe).bfloat16()
    x = torch.randn(64, 256).bfloat16()
    grad = torch.randn_like(here(x)) * 1e-2
    there = copy.deepcopy(here).to(devices.DEVICE)
    wanted = one_step(here, here, x, grad)
    found = one_step(there, there, x.to(devices.DEVICE), grad.to(devices.DEVICE))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        difference = (found[name].cpu().float() - value.float()).norm() / value.float().norm()
        assert difference < 0.1, name

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

import octavo
from octavo.errors import BackendError, ConfigError
from octavo.formats import E4M3, E5M2, E8M0
from octavo.functional import InputOperands, cast_operand, fp8_linear
from octavo.numerics import PerBlock, PerRow, QuantizedTensor, ScaleRounding, quantize
from octavo.quantization.qat.straight_through import straight_through_linear
from octavo.recipes import CastSpec, GemmSpec, History, Recipe, Scaling
from octavo.scaling import LayerScaling, OperandScaling
from tests.contract.gemm_oracle import assert_product, assert_same_operand, recorded_products

TENSORWISE = octavo.recipes.get("tensorwise")
PLAIN = GemmSpec(a=None, b=None)
GEMMS = ("output", "grad_input", "grad_weight")


def _tensors(M: int = 6, K: int = 24, N: int = 16, *, dtype: torch.dtype = torch.float32):
    x = torch.randn(M, K).to(dtype).requires_grad_()
    weight = torch.randn(N, K).to(dtype).requires_grad_()
    bias = torch.randn(N).to(dtype).requires_grad_()
    return x, weight, bias, torch.randn(M, N).to(dtype)


@pytest.mark.parametrize("count", [1, 2], ids=["one GEMM plain", "two GEMMs plain"])
@pytest.mark.parametrize("base", ["tensorwise", "rowwise"])
def test_each_product_follows_its_own_specification(base, count):
    recipe = octavo.recipes.get(base)
    for plain in itertools.combinations(GEMMS, count):
        changes: dict[str, Any] = dict.fromkeys(plain, PLAIN)
        mixed = replace(recipe, name="mixed", **changes)
        x, weight, bias, grad = _tensors()
        with recorded_products() as products:
            y = fp8_linear(x, weight, bias, mixed)
            y.backward(grad)
        assert len(products) == 3 - count
        hp = {
            "output": (y, x, weight, bias),
            "grad_input": (x.grad, grad, weight.t(), None),
            "grad_weight": (weight.grad, grad.t(), x.t(), None),
        }
        for name in plain:
            result, a, b, extra = hp[name]
            assert result is not None
            assert_product(result.detach(), a.detach(), b.detach(), None if extra is None else extra.detach())


def test_one_cast_serves_two_gemms_only_if_their_specs_agree():
    """The same tensor as E4M3 forward and E5M2 in grad_weight: two casts, each with its own codes."""
    e4m3, e5m2 = CastSpec(format=E4M3), CastSpec(format=E5M2)
    recipe = Recipe(
        name="two casts",
        output=GemmSpec(a=e4m3, b=e4m3),
        grad_input=GemmSpec(a=e5m2, b=e5m2),
        grad_weight=GemmSpec(a=e4m3, b=e5m2),
    )
    x, weight, bias, grad = _tensors()
    with recorded_products() as products:
        fp8_linear(x, weight, bias, recipe).backward(grad)
    expected = (
        (quantize(x.detach(), E4M3), quantize(weight.detach(), E4M3)),
        (quantize(grad, E5M2), quantize(weight.detach().t(), E5M2)),
        (quantize(grad.t(), E4M3), quantize(x.detach().t(), E5M2)),
    )
    for product, (a, b) in zip(products, expected, strict=True):
        assert_same_operand(product.a, a)
        assert_same_operand(product.b, b)


def test_a_second_cast_of_a_delayed_tensor_takes_the_past_too():
    forward, backward = (CastSpec(format=fmt, scaling=Scaling.DELAYED) for fmt in (E4M3, E5M2))
    recipe = Recipe(
        name="two delayed casts",
        output=GemmSpec(a=forward, b=forward),
        grad_input=GemmSpec(a=backward, b=backward),
        grad_weight=GemmSpec(a=forward, b=backward),
        history=History(),
    )
    x, weight, _, grad = _tensors()
    amaxes = torch.tensor([10.0, 20.0, 30.0])
    with recorded_products() as products:
        fp8_linear(x, weight, None, recipe, scaling=LayerScaling(amaxes=amaxes)).backward(grad)
    of_input, of_weight, of_grad = amaxes
    assert_same_operand(products[1].b, quantize(weight.detach().t(), E5M2, amax=of_weight))
    assert_same_operand(products[2].a, quantize(grad.t(), E4M3, amax=of_grad))
    assert_same_operand(products[2].b, quantize(x.detach().t(), E5M2, amax=of_input))


def test_square_blocks_are_cast_once_and_ragged_ones_per_orientation():
    block, row_block = (
        CastSpec(format=E4M3, granularity=PerBlock(8, 8)),
        CastSpec(format=E4M3, granularity=PerBlock(1, 8)),
    )
    gemm = GemmSpec(a=row_block, b=block)
    recipe = Recipe(name="blocks", output=gemm, grad_input=gemm, grad_weight=GemmSpec(a=row_block, b=row_block))
    x, weight, _, grad = _tensors()
    with recorded_products() as products:
        y = fp8_linear(x, weight, None, recipe)
        y.backward(grad)
    assert_same_operand(products[1].b, quantize(weight.detach().t(), E4M3, granularity=PerBlock(8, 8)))
    assert_same_operand(products[2].b, quantize(x.detach().t(), E4M3, granularity=PerBlock(1, 8)))
    assert_product(y.detach(), products[0].a, products[0].b)


@pytest.mark.parametrize(
    ("frozen", "products"), [((), 3), (("weight",), 2), (("x",), 2), (("x", "weight"), 1)], ids=str
)
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "delayed"])
def test_only_needed_gradients_are_multiplied(name, frozen, products):
    x, weight, bias, grad = _tensors()
    tensors = {"x": x, "weight": weight}
    for key in frozen:
        tensors[key].requires_grad_(False)
    with recorded_products() as executed:
        fp8_linear(x, weight, bias, octavo.recipes.get(name)).backward(grad)
    assert len(executed) == products
    assert [key for key, tensor in tensors.items() if tensor.grad is None] == list(frozen)
    assert bias.grad is not None


def test_cast_operand_takes_the_scale_that_its_specification_names():
    x = torch.randn(4, 8)
    dynamic, delayed = CastSpec(format=E4M3), CastSpec(format=E4M3, scaling=Scaling.DELAYED, margin=1)
    past = torch.tensor(100.0)
    assert cast_operand(x, None) is x
    for spec, amax, expected in (
        (dynamic, past, quantize(x, E4M3)),
        (delayed, past, quantize(x, E4M3, amax=past, margin=1)),
        (delayed, torch.tensor(0.0), quantize(x, E4M3, margin=1)),
        (delayed, None, quantize(x, E4M3, margin=1)),
    ):
        operand = cast_operand(x, spec, OperandScaling(amax=amax))
        assert isinstance(operand, QuantizedTensor)
        assert_same_operand(operand, expected)


@pytest.mark.parametrize("nonfinite", ["propagate", "saturate"])
def test_cast_operand_passes_every_field_on(nonfinite):
    x = torch.tensor([[1e-3, float("inf"), 3e-3]])
    options: dict[str, Any] = {
        "granularity": PerRow(),
        "scale_rounding": ScaleRounding.FLOOR,
        "scale_format": E8M0,
        "amax_floor": 0.5,
        "margin": 2,
        "nonfinite": nonfinite,
    }
    spec = CastSpec(format=E5M2, **options)
    operand = cast_operand(x, spec)
    assert isinstance(operand, QuantizedTensor)
    assert_same_operand(operand, quantize(x, E5M2, **options))


def test_pending_takes_the_gradients_amax():
    x, weight, _, grad = _tensors()
    pending = torch.tensor([-1.0, -1.0, 0.5])
    tap = LayerScaling(amaxes=torch.ones(3), pending=pending)
    fp8_linear(x, weight, None, octavo.recipes.get("delayed"), scaling=tap).backward(grad)
    assert pending.tolist() == [tensor.detach().abs().max().item() for tensor in (x, weight, grad)]


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "delayed"])
def test_a_tensor_that_is_cast_twice_is_counted_once(name):
    x, weight, _, grad = _tensors()
    with torch.no_grad():
        x[0, 0], x[1, 1], weight[2, 2] = float("nan"), float("inf"), float("-inf")
    grad[3, 3] = float("nan")
    counts = torch.zeros(3, dtype=torch.int64)
    fp8_linear(x, weight, None, octavo.recipes.get(name), scaling=LayerScaling(nonfinite=counts)).backward(grad)
    assert counts.tolist() == [2, 1, 1]


def test_bias_gradient_is_summed_in_float32():
    x, weight, bias, _ = _tensors(M=4096, dtype=torch.bfloat16)
    fp8_linear(x, weight, bias, TENSORWISE).backward(torch.ones(4096, 16, dtype=torch.bfloat16))
    assert bias.grad is not None
    assert bias.grad.tolist() == [4096.0] * 16, "bfloat16 sums would stop at 256"


def test_second_derivative_is_refused_by_torch():
    x, weight, bias, _ = _tensors()
    (grad,) = torch.autograd.grad(fp8_linear(x, weight, bias, TENSORWISE).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
@pytest.mark.parametrize(
    "compute",
    [
        lambda x, w: fp8_linear(x, w, None, TENSORWISE).sum(),
        lambda x, w: straight_through_linear(x, w, None, TENSORWISE).sum(),
        lambda x, w: octavo.fake_quantize(w, E4M3).sum(),
    ],
)
def test_function_transforms_are_refused_in_one_sentence(transform, compute):
    x, weight, *_ = _tensors()
    with pytest.raises(BackendError, match=r"torch\.func .* does not support .*; use backward\(\)"):
        transform(lambda w: compute(x.detach(), w))(weight.detach())


def test_function_transforms_run_in_high_precision():
    layer, x = octavo.nn.Linear(4, 4), torch.ones(2, 4)
    with octavo.autocast(enabled=False):
        gradient = torch.func.grad(lambda y: layer(y).sum())(x)
    assert torch.equal(gradient, layer.weight.detach().sum(0).expand(2, 4))


def test_gradients_point_the_way_of_the_exact_ones():
    """Against finite arithmetic: a whole different route, float64 autograd on the unquantized tensors."""
    x, weight, bias, grad = _tensors(M=64, K=48, N=32)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight, bias)]
    torch.nn.functional.linear(*exact).backward(grad.double())
    fp8_linear(x, weight, bias, TENSORWISE).backward(grad)
    for tensor, reference, worst in ((x, exact[0], 0.08), (weight, exact[1], 0.08), (bias, exact[2], 1e-6)):
        assert tensor.grad is not None
        assert reference.grad is not None
        error = (tensor.grad.double() - reference.grad).norm() / reference.grad.norm()
        assert error < worst


FAST, SLOW = "hopper-fast", "hopper-slow"
TENSOR_CORE_SUMS = {  # of output, grad_input and grad_weight, where they are in FP8
    "tensorwise": [FAST, SLOW, SLOW],
    "delayed": [FAST, SLOW, SLOW],
    "article": [FAST, SLOW, SLOW],
    "delayed_te": [FAST, SLOW, SLOW],
    "rowwise": [FAST, SLOW, SLOW],
    "rowwise_hp_grad_weight": [FAST, SLOW],
    "blockwise": [SLOW, SLOW, SLOW],
    "static": [FAST],
}


@pytest.mark.parametrize("emulated", [False, True], ids=["fp32 sums", "emulated"])
@pytest.mark.parametrize("name", TENSOR_CORE_SUMS)
def test_tensor_cores_are_emulated_on_request(name, emulated):
    x, weight, bias, grad_output = _tensors()
    recipe = octavo.recipes.get(name, emulate_tensor_cores=emulated)
    with recorded_products() as products:
        y = fp8_linear(x, weight, bias, recipe, scaling=LayerScaling(input_scale=torch.tensor(0.01)))
        y.backward(grad_output)
    sums = TENSOR_CORE_SUMS[name]
    assert [product.problem.accumulate for product in products] == (sums if emulated else ["fp32"] * len(sums))
    fast = [not emulated and how == FAST for how in sums]
    assert [product.problem.fast_accumulation for product in products] == fast
    assert {product.backend == "hopper_model" for product in products} == {emulated}


def test_every_preset_emulates_tensor_cores_or_refuses():
    for name in set(octavo.recipes.names()) - TENSOR_CORE_SUMS.keys():
        with pytest.raises(ConfigError, match=f"recipe '{name}' has no option 'emulate_tensor_cores'"):
            octavo.recipes.get(name, emulate_tensor_cores=True)


def _made_beforehand(x: torch.Tensor, recipe: Recipe) -> InputOperands:
    """What somebody who makes ``x`` would hand over instead of it."""
    output, wanted = cast_operand(x, recipe.output.a), recipe.grad_weight.b
    shared = wanted == recipe.output.a and wanted is not None and wanted.granularity.orientation_free
    return InputOperands(output, None if shared else cast_operand(x.t(), wanted))


@pytest.mark.parametrize("name", ["tensorwise", "delayed", "rowwise", "rowwise_hp_grad_weight", "blockwise", "bf16"])
def test_prepared_operands_are_used_and_the_input_values_are_ignored(name):
    recipe = octavo.recipes.get(name)
    x, weight, bias, grad = _tensors()
    wanted = [*torch.autograd.grad(fp8_linear(x, weight, bias, recipe), (x, weight, bias), grad)]
    pending = torch.full((3,), -1.0) if recipe.is_delayed else None
    tap = LayerScaling(pending=pending, nonfinite=torch.zeros(3, dtype=torch.int64))
    placeholder = torch.full((1, 1, 1), float("nan")).expand(2, 3, 24).detach().requires_grad_()
    y = fp8_linear(placeholder, weight, bias, recipe, input_operands=_made_beforehand(x.detach(), recipe), scaling=tap)
    torch.testing.assert_close(y.reshape(6, 16), fp8_linear(x, weight, bias, recipe), rtol=0, atol=0)
    wanted[0] = wanted[0].reshape(2, 3, 24)
    actual = torch.autograd.grad(y, (placeholder, weight, bias), grad.reshape(2, 3, 16))
    torch.testing.assert_close(list(actual), wanted, rtol=0, atol=0)
    assert pending is None or pending[0] == -1
    assert tap.nonfinite is not None
    assert tap.nonfinite[0] == 0


def test_operands_that_a_recipe_does_not_multiply_are_refused():
    x, weight, _, _ = _tensors()
    rowwise, rows = octavo.recipes.get("rowwise"), quantize(x, E4M3, granularity=PerRow())
    wrong = (
        (TENSORWISE, InputOperands(x.detach())),
        (TENSORWISE, InputOperands(quantize(x[1:], E4M3))),
        (TENSORWISE, InputOperands(quantize(x, E4M3), quantize(x, E4M3))),
        (rowwise, InputOperands(rows)),
    )
    for recipe, operands in wrong:
        with pytest.raises(ConfigError, match="input_operands"):
            fp8_linear(x, weight, None, recipe, input_operands=operands)
    fp8_linear(x, weight.detach(), None, rowwise, input_operands=InputOperands(rows))
    with torch.no_grad():
        fp8_linear(x, weight, None, rowwise, input_operands=InputOperands(rows))


@pytest.mark.long
def test_operands_made_beforehand_in_a_compiled_graph():
    def step(x, weight, hp):
        return fp8_linear(x, weight, None, TENSORWISE, input_operands=_made_beforehand(hp, TENSORWISE))

    x, weight, _, _ = _tensors(32, 32, 32)
    made = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        y = function(x, weight, x.detach())
        made.append([y, *torch.autograd.grad(y, (x, weight), torch.ones_like(y))])
    torch.testing.assert_close(made[1], made[0], rtol=0, atol=0)

"""Every recipe, over shapes and dtypes: operands bit for bit, output and all three gradients within the GEMM's bound.

The expectation is computed here from the recipe table of the documentation, not from the recipe object: which format
and granularity each operand of each GEMM has. What a cast gives is operand_oracle.py's.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import octavo
from octavo.formats import E5M2, E8M0
from octavo.kernels import needs_widening
from octavo.nn import Linear
from octavo.nn.scaling_state import nonfinite_counts, update_scales
from octavo.numerics import PerBlock, PerRow, QuantizedTensor, ScaleRounding
from octavo.recipes import Recipe
from tests.contract.gemm_oracle import (
    Product,
    assert_product,
    assert_row_sum,
    assert_same_operand,
    decode,
    recorded_products,
)
from tests.contract.operand_oracle import Operand, expected_operand

_T4, _T5 = Operand(), Operand(E5M2)
_ROW = Operand(granularity=PerRow(), rounding=ScaleRounding.RCEIL)
_TILE = Operand(granularity=PerBlock(1, 128), rounding=ScaleRounding.RCEIL)
_BLOCK = Operand(granularity=PerBlock(128, 128), rounding=ScaleRounding.RCEIL)
_FP32_TILE, _FP32_BLOCK = Operand(granularity=PerBlock(1, 128)), Operand(granularity=PerBlock(128, 128))
_MX, _MX_FLOOR, _MX_EVEN = (
    Operand(granularity=PerBlock(1, 32), rounding=rounding, scale_format=E8M0, amax_floor=0.0)
    for rounding in (ScaleRounding.RCEIL, ScaleRounding.FLOOR, ScaleRounding.EVEN)
)
_T4_POWER = Operand(rounding=ScaleRounding.RCEIL)
_FP32_ROW = Operand(granularity=PerRow())
Pair = tuple[Operand | None, Operand] | None  # None: in high precision

# recipe: the operands of output, grad_input, grad_weight
TABLE: dict[str, tuple[Pair, Pair, Pair]] = {
    "tensorwise": ((_T4, _T4), (_T5, _T4), (_T5, _T4)),
    "delayed": ((_T4, _T4), (_T5, _T4), (_T5, _T4)),
    "article": ((_T4, _T4), (_T5, _T4), (_T5, _T4)),
    "delayed_te": ((_T4, _T4), (_T5, _T4), (_T5, _T4)),
    "rowwise": ((_ROW, _ROW), (_ROW, _ROW), (_ROW, _ROW)),
    "rowwise_hp_grad_weight": ((_ROW, _ROW), (_ROW, _T4_POWER), None),
    "blockwise": ((_TILE, _BLOCK), (_TILE, _BLOCK), (_TILE, _TILE)),
    "blockwise, any scale": ((_FP32_TILE, _FP32_BLOCK), (_FP32_TILE, _FP32_BLOCK), (_FP32_TILE, _FP32_TILE)),
    "mxfp8": ((_MX, _MX), (_MX, _MX), (_MX, _MX)),
    "mxfp8, floor": ((_MX_FLOOR, _MX_FLOOR), (_MX_FLOOR, _MX_FLOOR), (_MX_FLOOR, _MX_FLOOR)),
    "mxfp8, even": ((_MX_EVEN, _MX_EVEN), (_MX_EVEN, _MX_EVEN), (_MX_EVEN, _MX_EVEN)),
    "static": ((_T4, _T4), None, None),
    "static, weight by row": ((_T4, Operand(granularity=PerRow())), None, None),
    "static, weight by block": ((_T4, _FP32_BLOCK), None, None),
    "static, powers of two": ((_T4, _T4_POWER), None, None),
    "weight_only": ((None, _FP32_ROW), None, None),
    "weight_only, tensor": ((None, _T4), None, None),
    "weight_only, blocks": ((None, _FP32_BLOCK), None, None),
}
DELAYED = ("delayed", "delayed_te", "article")
OPTIONS: dict[str, dict[str, Any]] = {
    "blockwise, any scale": {"power_of_two": False},
    "mxfp8, floor": {"scale_rounding": "floor"},
    "mxfp8, even": {"scale_rounding": "even"},
    "static, weight by row": {"weight_granularity": "row"},
    "static, weight by block": {"weight_granularity": "128x128"},
    "static, powers of two": {"power_of_two": True},
    "weight_only, tensor": {"granularity": "tensor"},
    "weight_only, blocks": {"granularity": "128x128"},
}
STATIC_SCALE = torch.tensor(0.01)
FP8_RECIPES = tuple(TABLE)


def test_the_table_is_complete():
    assert {*(name.partition(",")[0] for name in TABLE), "bf16"} == set(octavo.recipes.names())


def _recipe(name: str) -> Recipe:
    return octavo.recipes.get(name.partition(",")[0], **OPTIONS.get(name, {}))


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# name: (leading dimensions, K, N)
SHAPES = {
    "three blocks of 128, and a rest": ((130,), 300, 272),
    "even": ((32,), 272, 256),
    "ragged": ((33,), 300, 303),
    "odd rows": ((31,), 256, 305),
    "one column": ((5,), 1, 7),
    "one row": ((1,), 33, 18),
    "one output": ((6,), 20, 1),
    "three dimensions": ((3, 7), 40, 24),
    "empty": ((0,), 16, 8),
    "empty batch": ((2, 0), 16, 8),
    "no leading dimension": ((), 24, 12),
}


def _leaf(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype).requires_grad_()


def _layer(recipe: str, K: int, N: int, dtype: torch.dtype, *, bias: bool = True) -> Linear:
    layer = Linear(K, N, bias, recipe=_recipe(recipe), manual_scale_updates=recipe in DELAYED, dtype=dtype)
    if recipe in DELAYED:  # the scales of the tested step come from another one's amaxes
        _step(layer, torch.randn(4, K, dtype=dtype) * 0.7, torch.full((4, N), 0.4, dtype=dtype))
        update_scales(layer)
        layer.zero_grad()
    if recipe.startswith("static"):
        octavo.load_scaling_state(layer, {"input.scale": STATIC_SCALE})
    return layer


def _step(layer: Linear, x: Tensor, grad_output: Tensor) -> Tensor:
    y: Tensor = layer(x)
    y.backward(grad_output)
    return y


def _past(layer: Linear) -> list[float]:
    """What delayed scales are made from; 0 where a recipe is not delayed, or has no past."""
    return [0.0] * 3 if layer.amax_history is None else layer.amax_history.amax.tolist()


def _check(recipe: str, layer: Linear, x: Tensor, grad_output: Tensor) -> None:
    past_input, past_weight, past_grad = _past(layer)
    with recorded_products() as products:
        y = _step(layer, x, grad_output)
    rows, grad_rows = x.detach().reshape(-1, x.shape[-1]), grad_output.reshape(-1, y.shape[-1])
    weight = layer.weight.detach()
    tensors = (
        ((rows, past_input), (weight, past_weight)),
        ((grad_rows, past_grad), (weight.t(), past_weight)),
        ((grad_rows.t(), past_grad), (rows.t(), past_input)),
    )
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    assert (y.dtype, x.grad.dtype, layer.weight.grad.dtype) == (x.dtype, x.dtype, layer.weight.dtype)
    assert y.shape == (*x.shape[:-1], weight.shape[0])
    results = (y.reshape(-1, y.shape[-1]), x.grad.reshape(rows.shape), layer.weight.grad)
    recorded = iter(products)
    for index, (pair, sources, result) in enumerate(zip(TABLE[recipe], tensors, results, strict=True)):
        bias = layer.bias.detach() if index == 0 else None
        if pair is None:
            _check_high_precision(result, *(source for source, _ in sources))
            continue
        left, right = pair
        if left is None:
            assert_weight_only(result, rows, expected_operand(right, weight), bias)
            continue
        held = (STATIC_SCALE.item() if recipe.startswith("static") else None, None)
        a, b = (
            expected_operand(row, source, past_amax=past, scale=scale)
            for row, (source, past), scale in zip((left, right), sources, held, strict=True)
        )
        product = next(recorded)
        assert_same_operand(product.a, a)
        assert_same_operand(product.b, b)
        assert_product(_float64_is_float32(result), a, b, bias=bias)
    assert next(recorded, None) is None
    assert_row_sum(_float64_is_float32(layer.bias.grad), grad_rows)


def _check_high_precision(result: Tensor, a: Tensor, b: Tensor) -> None:
    """In the dtype of ``a``, to which the other operand is rounded; a wider result holds the rounded values."""
    computed = torch.float32 if a.dtype is torch.float64 else a.dtype
    assert torch.equal(result.to(computed).to(result.dtype), result)
    assert_product(result.to(computed), a.to(computed), b.to(computed))


def assert_weight_only(
    result: Tensor, x: Tensor, weight: QuantizedTensor, bias: Tensor | None, *, rounds_product: bool = False
) -> None:
    """The product of ``x`` and the codes, decoded in FP32 and rounded to the input's dtype."""
    computed = torch.float32 if x.dtype is torch.float64 else x.dtype
    decoded = decode(weight).float().to(computed)
    if bias is not None and not needs_widening(x):
        bias = bias.to(computed)
    assert_product(_float64_is_float32(result), x.to(computed), decoded, bias=bias, rounds_product=rounds_product)


def _float64_is_float32(computed: Tensor) -> Tensor:
    """float64 layers compute in float32: the values must be float32's."""
    if computed.dtype is not torch.float64:
        return computed
    assert torch.equal(computed.float().double(), computed)
    return computed.float()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_operands_output_and_gradients(recipe, shape, dtype):
    leading, K, N = SHAPES[shape]
    layer = _layer(recipe, K, N, dtype)
    grad_output = torch.randn(*leading, N, dtype=dtype) * 1e-2
    _check(recipe, layer, _leaf(torch.randn(*leading, K), dtype), grad_output)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("size", [1e-14, 1e-30, 1e-37])
def test_small_tensors_have_scales_of_their_own(recipe, size):
    """Down to amaxes that no FP32 scale brings to the format's maximum: of those the encode scale is the largest."""
    layer = Linear(40, 24, recipe=_recipe(recipe))
    if recipe.startswith("static"):
        octavo.load_scaling_state(layer, {"input.scale": STATIC_SCALE})
    torch.nn.init.normal_(layer.weight, std=size)
    x = torch.randn(9, 40) * size
    x[3:6] *= 1e-6
    _check(recipe, layer, x.requires_grad_(), torch.randn(9, 24) * size)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_gradients_of_size_1e_30_do_not_vanish(recipe):
    """A power of two moves no code, so that all gradients are moved by it, but for a product of scales below 2^-126."""
    results = []
    for size in (1.0, 2.0**-100):  # 8e-31
        torch.manual_seed(0)
        layer, x = Linear(64, 48, recipe=_recipe(recipe)), torch.randn(32, 64, requires_grad=True)
        if recipe.startswith("static"):
            octavo.load_scaling_state(layer, {"input.scale": STATIC_SCALE})
        layer(x).backward(torch.randn(32, 48) * size)
        assert layer.weight.grad is not None
        assert x.grad is not None
        results.append((layer.weight.grad / size, x.grad / size))
    for ordinary, small in zip(*results, strict=True):
        assert ordinary.any()
        assert (ordinary - small).norm() <= 2.0**-20 * ordinary.norm()


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_strided_input_and_expanded_gradient(recipe):
    layer = _layer(recipe, 40, 24, torch.float32)
    strided = torch.randn(3, 40, 9).transpose(1, 2)  # [3, 9, 40], not contiguous
    expanded = torch.tensor(0.25).expand(3, 9, 24)  # what y.sum() sends back: all strides 0
    _check(recipe, layer, strided.detach().requires_grad_(), expanded)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_strided_weight(recipe):
    layer = _layer(recipe, 40, 24, torch.float32)
    layer.weight = torch.nn.Parameter(torch.randn(40, 48).t()[::2])
    assert not layer.weight.is_contiguous()
    _check(recipe, layer, torch.randn(5, 40, requires_grad=True), torch.randn(5, 24))


@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_master_weights_are_quantized_from_their_own_values(recipe, dtype):
    layer = _layer(recipe, 48, 32, torch.float32)
    _check(recipe, layer, _leaf(torch.randn(16, 48), dtype), torch.randn(16, 32, dtype=dtype))
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype is torch.float32
    if TABLE[recipe][2] is None:
        return  # as in the surrounding precision: see _check_high_precision
    assert not torch.equal(layer.weight.grad.to(dtype).float(), layer.weight.grad), "rounded on the way"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bf16_recipe_is_the_surrounding_precision(dtype):
    layer = Linear(40, 24, recipe="bf16", dtype=dtype)
    x = _leaf(torch.randn(8, 40), dtype)
    grad_output = torch.randn(8, 24, dtype=dtype)
    with recorded_products() as products:
        y = _step(layer, x, grad_output)
    assert not products, "a product ran in FP8"
    plain = x.detach().clone().requires_grad_()
    weight, bias = (p.detach().clone().requires_grad_() for p in (layer.weight, layer.bias))
    if needs_widening(x):
        assert x.grad is not None
        assert layer.weight.grad is not None
        assert_product(y, x.detach(), weight.detach(), bias.detach())
        assert_product(x.grad, grad_output, weight.detach().t())
        assert_product(layer.weight.grad, grad_output.t(), x.detach().t())
        return
    expected = F.linear(plain, weight, bias)
    expected.backward(grad_output)
    for actual, wanted in ((y, expected), (x.grad, plain.grad), (layer.weight.grad, weight.grad)):
        assert actual is not None
        assert wanted is not None
        assert torch.equal(actual, wanted)


def _results(layer: Linear, x: Tensor, grad_output: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = _step(layer, x, grad_output)
    assert x.grad is not None
    assert layer.weight.grad is not None
    results = {"output": y.detach(), "grad_input": x.grad, "grad_weight": layer.weight.grad}
    for bias in (parameter for name, parameter in layer.named_parameters() if name == "bias"):
        assert bias.grad is not None
        results["grad_bias"] = bias.grad[None]
    return results


# role: where its element [2, 5] may show; rows or columns of the results named, nothing elsewhere
REACHED: dict[str, dict[str, Any]] = {
    "input": {"output": (2, ...), "grad_weight": (..., 5)},
    "weight": {"output": (..., 2), "grad_input": (..., 5)},
    "grad_output": {"grad_input": (2, ...), "grad_weight": (5, ...), "grad_bias": (..., 5)},
}


@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("role", REACHED)
def test_a_non_finite_element_shows_in_its_row_and_nowhere_else(recipe, value, role):
    layer = _layer(recipe, 32, 16, torch.float32)
    tensors = {"input": torch.randn(6, 32), "weight": layer.weight.data, "grad_output": torch.randn(6, 16)}
    tensors[role][2, 5] = 0.0  # the amax is not at the broken element
    clean = _results(layer, tensors["input"], tensors["grad_output"])
    assert nonfinite_counts(layer) == {}
    tensors[role][2, 5] = value
    broken = _results(layer, tensors["input"], tensors["grad_output"])
    for name, result in broken.items():
        reached = torch.zeros_like(result, dtype=torch.bool)
        if name in REACHED[role]:
            reached[REACHED[role][name]] = True
        assert not result[reached].isfinite().any()
        assert torch.equal(result[~reached], clean[name][~reached]), name
    is_cast = role == "weight" or ("weight_only" not in recipe and (role == "input" or not recipe.startswith("static")))
    assert nonfinite_counts(layer) == ({role: 1} if is_cast else {}), "counted once a call, where it is cast"


def _assert_scales_are_positive_and_finite(products: list[Product]) -> None:
    for operand in (side for product in products for side in (product.a, product.b)):
        unit = QuantizedTensor(
            torch.ones(operand.shape).to(operand.data.dtype), operand.scale, operand.granularity, torch.float32
        )
        scales = decode(unit)
        assert (scales.isfinite() & (scales > 0)).all()


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_all_zero_tensors_give_zeros(recipe):
    layer = Linear(16, 8, bias=False, recipe=_recipe(recipe))
    if recipe.startswith("static"):
        octavo.load_scaling_state(layer, {"input.scale": STATIC_SCALE})
    torch.nn.init.zeros_(layer.weight)
    with recorded_products() as products:
        results = _results(layer, torch.zeros(4, 16), torch.zeros(4, 8))
    assert bool(products) != recipe.startswith("weight_only")
    _assert_scales_are_positive_and_finite(products)
    for result in results.values():
        assert torch.equal(result, torch.zeros_like(result))


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_zero_rows_columns_and_blocks_give_exact_zeros(recipe):
    layer = _layer(recipe, 256, 256, torch.float32, bias=False)
    x, weight, grad = torch.randn(160, 256), layer.weight.data, torch.randn(160, 256)
    for tensor in (x, weight, grad):
        tensor[140] = 0.0
        tensor[:, 140] = 0.0
        tensor[:128, :128] = 0.0  # whole tiles and a whole block, of the transpose too
    with recorded_products() as products:
        results = _results(layer, x, grad)
    _assert_scales_are_positive_and_finite(products)
    for a, b, result in (
        (x, weight, results["output"]),
        (grad, weight.t(), results["grad_input"]),
        (grad.t(), x.t(), results["grad_weight"]),
    ):
        assert result.isfinite().all()
        no_terms = (a != 0).double() @ (b != 0).double().t() == 0
        assert no_terms[140].all()
        assert no_terms[:, 140].all()
        assert not no_terms.all()
        assert torch.equal(result[no_terms], torch.zeros_like(result[no_terms]))

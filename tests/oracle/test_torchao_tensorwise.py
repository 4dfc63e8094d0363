"""torchao 0.18 as an oracle: its casts are intercepted and compared with ours bit for bit, recipe by recipe.

torchao multiplies by its scale to encode and hands the reciprocal to the GEMM; that reciprocal is octavo's ``scale``.
It emulates the GEMM by decoding to the original dtype, so outputs and gradients are compared within that rounding.
"""

import warnings
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import octavo
from octavo.nn import Linear
from octavo.numerics import QuantizedTensor
from octavo.recipes import GemmSpec, Recipe
from tests.contract.gemm_oracle import Product, recorded_products

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchao.float8", reason="torchao is not installed: its casts cannot be compared")
    from torchao.float8 import Float8LinearConfig
    from torchao.float8 import float8_linear as torchao_linear

# name: (leading dimensions, K, N)
SHAPES = {
    "even": ((32,), 64, 48),
    "ragged": ((33,), 30, 47),
    "three dimensions": ((3, 5), 40, 24),
    "one row": ((1,), 16, 16),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# torchao's six casts of a step, in their order: which operand of our products each one is, and whether transposed.
ORDER = ((0, "a", False), (0, "b", True), (1, "a", False), (1, "b", False), (2, "a", True), (2, "b", True))


@dataclass
class Cast:
    """What torchao made of one operand: its codes and encode scale, as a matrix."""

    data: Tensor
    encode_scale: Tensor

    def assert_equals(self, ours: QuantizedTensor, *, transposed: bool) -> None:
        data, scale = self.data, self.encode_scale.reciprocal()
        if transposed:
            data, scale = data.t(), scale.t() if scale.ndim == 2 else scale
        assert ours.data.dtype is data.dtype
        assert torch.equal(_bits(ours.data), _bits(data))
        assert torch.equal(_bits(ours.scale), _bits(scale))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8 if tensor.element_size() == 1 else torch.int32)


@pytest.fixture
def casts(monkeypatch):
    """torchao's casts, in their order."""
    made: list[Cast] = []
    original = torchao_linear.hp_tensor_to_float8_dynamic

    def recording(*args, **options):
        result = original(*args, **options)
        codes, scale = result._data.detach(), result._scale.detach()
        matrix = codes.reshape(-1, codes.shape[-1])
        made.append(Cast(matrix, scale.reshape(-1, scale.shape[-1]) if scale.ndim else scale))
        return result

    monkeypatch.setattr(torchao_linear, "hp_tensor_to_float8_dynamic", recording)
    return made


def _floored(recipe: Recipe) -> Recipe:
    """With torchao's EPS as the smallest amax."""

    def changed(gemm: GemmSpec) -> GemmSpec:
        a, b = (side and replace(side, amax_floor=1e-12) for side in (gemm.a, gemm.b))
        return replace(gemm, a=a, b=b)

    return replace(
        recipe,
        output=changed(recipe.output),
        grad_input=changed(recipe.grad_input),
        grad_weight=changed(recipe.grad_weight),
    )


def _pair(recipe: str, K: int, N: int, dtype: torch.dtype, *, floored: bool) -> tuple[Linear, torch.nn.Module]:
    specified = octavo.recipes.get(recipe)
    ours = Linear(K, N, bias=False, recipe=_floored(specified) if floored else specified, dtype=dtype)
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    plain = torch.nn.Linear(K, N, bias=False, dtype=dtype)
    plain.load_state_dict(ours.state_dict())
    return ours, torchao_linear.Float8Linear.from_float(plain, config=config)


def _step(layer: torch.nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(grad)
    weight_grad = layer.get_parameter("weight").grad
    assert x.grad is not None
    assert weight_grad is not None
    return y.detach(), x.grad, weight_grad


def _compare(products: list[Product], casts: list[Cast]) -> None:
    assert len(casts) == len(ORDER)
    for cast, (index, side, transposed) in zip(casts, ORDER, strict=True):
        product = products[index]
        cast.assert_equals(product.a if side == "a" else product.b, transposed=transposed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_codes_scales_and_products(casts, recipe, shape, dtype):
    leading, K, N = SHAPES[shape]
    ours, theirs = _pair(recipe, K, N, dtype, floored=False)
    x, grad = torch.randn(*leading, K).to(dtype), (torch.randn(*leading, N) * 1e-3).to(dtype)
    with recorded_products() as products:
        results = _step(ours, x, grad)
    expected = _step(theirs, x, grad)
    _compare(products, casts)
    rounding = 1e-5 if dtype is torch.float32 else 4 * torch.finfo(dtype).eps
    for result, wanted in zip(results, expected, strict=True):
        assert result.dtype is wanted.dtype
        assert (result.double() - wanted.double()).norm() <= rounding * wanted.double().norm()


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-4, 1e4, 1e30], ids=str)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_codes_and_scales_over_magnitudes(casts, recipe, scale):
    """From below torchao's EPS, which our casts then have too, to near float32's end; heavy tails, a row of zeros."""
    ours, theirs = _pair(recipe, 40, 24, torch.float32, floored=True)
    x, grad = torch.randn(17, 40).exp() * scale, torch.randn(17, 24) ** 5 * min(scale, 1e4)
    x[3], grad[5] = 0.0, 0.0
    with recorded_products() as products:
        _step(ours, x, grad)
    _step(theirs, x, grad)
    _compare(products, casts)

import pytest
import torch
from torch.nn import functional as F

import octavo
from octavo.errors import ConfigError
from octavo.nn import LayerNorm, LayerNormLinear, RMSNorm
from tests.contract.gemm_oracle import recorded_products
from tests.contract.transformer_oracle import Shape, assert_close, linear, norm, spread_out, weights_of

KINDS = ["layernorm", "rmsnorm", "none"]


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_output_and_gradients(kind, bias, zero_centered):
    layer = LayerNormLinear(13, 7, bias=bias, normalization=kind, zero_centered=zero_centered, recipe="bf16")
    spread_out(layer)
    x, up = torch.randn(2, 5, 13, requires_grad=True), torch.randn(2, 5, 7)
    weights, exact_x = weights_of(layer), x.detach().double().requires_grad_()
    shape = Shape(heads=0, kv_heads=0, normalization=kind, zero_centered=zero_centered)
    exact = linear(weights, "linear", norm(weights, "norm", exact_x, shape))
    y = layer(x)
    assert_close(y, exact, relative=1e-5)
    actual = torch.autograd.grad(y, [x, *layer.parameters()], up)
    expected = torch.autograd.grad(exact, [exact_x, *weights.values()], up.double())
    for name, ours, theirs in zip(["x", *weights], actual, expected, strict=True):
        assert_close(ours, theirs, relative=1e-5, what=name)


@pytest.mark.parametrize(("kind", "expected"), [("layernorm", LayerNorm), ("rmsnorm", RMSNorm)])
def test_children_are_the_norm_and_the_linear_layer(kind, expected):
    layer = LayerNormLinear(8, 4, normalization=kind, eps=1e-3, recipe="rowwise", dtype=torch.bfloat16)
    assert isinstance(layer.norm, expected)
    assert layer.norm.eps == 1e-3
    assert (layer.linear.in_features, layer.linear.out_features) == (8, 4)
    assert layer.linear.recipe.name == "rowwise"
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", KINDS)
def test_norm_output_is_returned_on_request(kind):
    layer = LayerNormLinear(8, 4, normalization=kind, return_norm_output=True)
    x = torch.randn(3, 8)
    y, normed = layer(x)
    assert torch.equal(normed, layer.norm(x))
    assert torch.equal(y, layer.linear(normed))
    if kind == "none":
        assert torch.equal(normed, x)


def test_the_norms_output_is_what_is_quantized():
    layer, x = LayerNormLinear(16, 8), torch.randn(4, 16)
    with recorded_products() as products:
        layer(x)
    (product,) = products
    codes = octavo.quantize(F.layer_norm(x, (16,)), octavo.E4M3).data
    assert torch.equal(product.a.data.float(), codes.float())


def test_meta_parameters_can_be_made_later():
    norm = LayerNormLinear(8, 4, zero_centered=True, device="meta").to_empty(device="cpu").norm
    assert isinstance(norm, LayerNorm)
    norm.reset_parameters()
    assert norm.bias is not None
    assert torch.equal(norm.weight, torch.zeros(8))
    assert torch.equal(norm.bias, torch.zeros(8))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"in_features": 0}, "in_features must be a whole number of at least 1, not 0"),
        ({"out_features": 1.5}, "out_features must be a whole number of at least 1, not 1.5"),
        ({"normalization": "batchnorm"}, "normalization must be one of layernorm, rmsnorm, none, not 'batchnorm'"),
        ({"eps": 0.0}, "eps must be a positive number"),
        ({"recipe": "fp4"}, "there is no recipe 'fp4'"),
    ],
)
def test_refusals(arguments, words):
    with pytest.raises(ConfigError, match=words):
        LayerNormLinear(**{"in_features": 8, "out_features": 4, **arguments})

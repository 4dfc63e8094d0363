import pytest
import torch

from octavo.errors import ConfigError
from octavo.nn import LayerNormMLP
from octavo.nn.activations import ACTIVATIONS
from tests.contract.gemm_oracle import recorded_products
from tests.contract.transformer_oracle import Shape, assert_close, mlp, spread_out, weights_of


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm", "none"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_output_and_gradients(activation, kind):
    layer = LayerNormMLP(9, 15, activation=activation, normalization=kind, bias=kind != "rmsnorm", recipe="bf16")
    spread_out(layer)
    x, up = torch.randn(2, 5, 9, requires_grad=True), torch.randn(2, 5, 9)
    weights, exact_x = weights_of(layer), x.detach().double().requires_grad_()
    exact = mlp(weights, "", exact_x, Shape(heads=0, kv_heads=0, normalization=kind, activation=activation))
    y = layer(x)
    assert_close(y, exact, relative=1e-5)
    actual = torch.autograd.grad(y, [x, *layer.parameters()], up)
    expected = torch.autograd.grad(exact, [exact_x, *weights.values()], up.double())
    for name, ours, theirs in zip(["x", *weights], actual, expected, strict=True):
        assert_close(ours, theirs, relative=2e-5, what=name)


def test_gate_and_up_share_one_quantized_input():
    layer = LayerNormMLP(16, 32, activation="swiglu")
    with recorded_products() as products:
        layer(torch.randn(4, 16))
    assert [tuple(product.b.shape) for product in products] == [(64, 16), (16, 32)]


def test_both_layers_run_the_recipe():
    layer = LayerNormMLP(8, 16, recipe="delayed", manual_scale_updates=True)
    assert [inner.recipe.name for inner in (layer.fc1, layer.fc2)] == ["delayed", "delayed"]
    assert layer.fc1.scale_updates.manual
    assert "activation=gelu" in repr(layer)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"hidden_size": 0}, "hidden_size must be a whole number"),
        ({"ffn_hidden_size": -1}, "ffn_hidden_size must be a whole number of at least 1, not -1"),
        ({"activation": "mish"}, "activation must be one of gelu, gelu_tanh, .*swiglu, not 'mish'"),
        ({"normalization": "x"}, "normalization must be one of"),
        ({"eps": -1.0}, "eps must be a positive number"),
        ({"recipe": "fp4"}, "there is no recipe"),
    ],
)
def test_refusals(arguments, words):
    with pytest.raises(ConfigError, match=words):
        LayerNormMLP(**{"hidden_size": 8, "ffn_hidden_size": 16, **arguments})

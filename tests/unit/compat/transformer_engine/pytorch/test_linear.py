"""Against torch's own layers, in high precision; that a block's recipe runs is shown in test_precision.py."""

import pytest
import torch
from torch.nn import functional as F

import octavo
from octavo.compat.transformer_engine.pytorch import LayerNorm, LayerNormLinear, LayerNormMLP, Linear, RMSNorm
from octavo.errors import ConfigError
from tests.contract.transformer_oracle import spread_out

ACTIVATIONS = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x) ** 2,
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "qgeglu": lambda x: x[..., :12] * torch.sigmoid(1.702 * x[..., :12]) * x[..., 12:],
    "sreglu": lambda x: F.relu(x[..., :12]) ** 2 * x[..., 12:],
    "geglu": lambda x: F.gelu(x[..., :12], approximate="tanh") * x[..., 12:],
    "reglu": lambda x: F.relu(x[..., :12]) * x[..., 12:],
    "swiglu": lambda x: F.silu(x[..., :12]) * x[..., 12:],
}


def _norm(kind, x, module, *, eps, centred):
    gain = module.weight + 1 if centred else module.weight
    if kind == "RMSNorm":
        return F.rms_norm(x, x.shape[-1:], gain, eps)
    return F.layer_norm(x, x.shape[-1:], gain, module.bias, eps)


@pytest.mark.parametrize(("kind", "module"), [("LayerNorm", LayerNorm), ("RMSNorm", RMSNorm)])
@pytest.mark.parametrize("centred", [False, True])
def test_norms(kind, module, centred):
    norm, x = module(8, 1e-3, zero_centered_gamma=centred), torch.randn(3, 8)
    spread_out(norm)
    torch.testing.assert_close(norm(x), _norm(kind, x, norm, eps=1e-3, centred=centred))


def test_linear():
    layer, x = Linear(6, 4, bias=False, params_dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    assert layer.bias is None
    assert torch.equal(layer(x), x @ layer.weight.T)


def test_convert_and_restore_reach_every_linear():
    model = torch.nn.ModuleList([Linear(8, 8), LayerNormLinear(8, 8), LayerNormMLP(8, 8)])
    names = list(model.state_dict())
    assert len(octavo.convert(model, "rowwise").converted) == 4
    assert len(octavo.restore(model)) == 4
    assert list(model.state_dict()) == names
    model[0](torch.randn(2, 8))


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("centred", [False, True])
def test_layernorm_linear(kind, centred):
    options = {"normalization": kind, "zero_centered_gamma": centred, "return_layernorm_output": True}
    module, x = LayerNormLinear(8, 6, 1e-2, **options), torch.randn(2, 3, 8)
    spread_out(module)
    y, normed = module(x)
    expected = _norm(kind, x, module.layer.norm, eps=1e-2, centred=centred)
    torch.testing.assert_close(normed, expected)
    torch.testing.assert_close(y, F.linear(expected, module.layer.linear.weight, module.layer.linear.bias))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_layernorm_mlp(name):
    module, x = LayerNormMLP(8, 12, 1e-2, activation=name), torch.randn(2, 3, 8)
    spread_out(module)
    inner = module.layer
    normed = _norm("LayerNorm", x, inner.norm, eps=1e-2, centred=False)
    hidden = ACTIVATIONS[name](F.linear(normed, inner.fc1.weight, inner.fc1.bias))
    torch.testing.assert_close(module(x), F.linear(hidden, inner.fc2.weight, inner.fc2.bias))


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("bias", [False, True])
def test_parameters_are_attributes_by_their_published_names(normalization, bias):
    linear = LayerNormLinear(8, 6, normalization=normalization, bias=bias)
    mlp = LayerNormMLP(8, 12, normalization=normalization, bias=bias)
    for module, names in ((linear, ("",)), (mlp, ("fc1_", "fc2_"))):
        named = {f"{name}{kind}" for name in (*names, "layer_norm_") for kind in ("weight", "bias")}
        found = {name: getattr(module, name) for name in named}
        parameters = {id(parameter) for parameter in module.parameters()}
        assert {id(tensor) for tensor in found.values() if tensor is not None} == parameters
        missing = {f"{name}bias" for name in names if not bias}
        missing |= {"layer_norm_bias"} if normalization == "RMSNorm" else set()
        assert {name for name, tensor in found.items() if tensor is None} == missing
    assert mlp.fc1_weight.shape == (12, 8)
    assert mlp.fc2_weight.shape == (8, 12)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_a_norms_size_has_two_names(kind):
    assert kind(hidden_size=8).size == kind(8).size == kind(normalized_shape=8).size
    for sizes in ({}, {"hidden_size": 8, "normalized_shape": 8}):
        with pytest.raises(ConfigError, match="one of normalized_shape and hidden_size"):
            kind(**sizes)


def test_unsupported_return_values_are_refused():
    with pytest.raises(ConfigError, match="return_layernorm_output"):
        LayerNormMLP(8, 8, return_layernorm_output=True)

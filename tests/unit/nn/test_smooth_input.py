"""Smoothed linear layers: bits without casts, the formula with ml_dtypes' rounding, and gradients."""

import ml_dtypes
import numpy as np
import pytest
import torch

from octavo.nn import Linear
from octavo.nn.smooth_input import smooth_linear


def outlier_input(*shape):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    x[..., 3] *= 5000
    x[..., 5] = 0
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_casts_no_bit_changes(dtype):
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(16, 8, dtype=dtype), outlier_input(2, 7, 16).to(dtype).requires_grad_()
    smooth, plain = smooth_linear(layer, x), layer(x)
    assert torch.equal(smooth, plain)
    parameters = (x, layer.weight, layer.bias)
    ones = torch.ones_like(plain)
    for one, other in zip(
        torch.autograd.grad(smooth, parameters, ones), torch.autograd.grad(plain, parameters, ones), strict=True
    ):
        assert torch.equal(one, other)


def codes(values):
    """E4M3 with one scale for the tensor, as decoded values."""
    scale = np.float32(448 / np.abs(values).max())
    return (values * scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) / np.float64(scale)


def test_casts_are_of_smoothed_operands():
    torch.manual_seed(0)
    layer, x = Linear(16, 8, bias=False, recipe="tensorwise"), outlier_input(9, 16)
    exponents = [0 if not column.any() else int(np.floor(np.log2(np.abs(column).max()))) + 1 for column in x.numpy().T]
    factors = np.float32(2.0) ** np.array(exponents, np.float32)
    weight = layer.weight.detach().numpy()
    wanted = codes(x.numpy() / factors) @ codes(weight * factors).T
    found = smooth_linear(layer, x).detach().numpy()
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-4)
    assert np.abs(x.numpy() / factors).max(0)[[3, 5]].tolist() == [pytest.approx(0.75, abs=0.25), 0]


def test_small_channels_keep_their_precision():
    """All channels but one would lie below E4M3's smallest number."""
    torch.manual_seed(0)
    layer, x = Linear(16, 8, bias=False, recipe="tensorwise"), torch.randn(64, 16)
    x[:, 3] *= 2.0**24
    with torch.no_grad():
        layer.weight[:, 3] *= 2.0**-24
        exact = torch.nn.functional.linear(x, layer.weight)
        errors = [(found - exact).norm() / exact.norm() for found in (smooth_linear(layer, x), layer(x))]
    assert errors[0] < 0.05
    assert errors[1] > 0.5


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_elements_propagate(value):
    layer, x = torch.nn.Linear(4, 2), torch.ones(3, 4)
    x[1, 2] = value
    out = smooth_linear(layer, x)
    assert not out[1].isfinite().any()
    assert out[0].isfinite().all()

import pytest
import torch
from torch.nn import functional as F

from octavo.errors import ConfigError
from octavo.nn import LayerNorm, RMSNorm

KINDS = [LayerNorm, RMSNorm]


def _exact(norm, x):
    """float64, by torch's own functions."""
    weight = norm.weight.detach().double() + (1 if norm.zero_centered else 0)
    if isinstance(norm, RMSNorm):
        return F.rms_norm(x.double(), weight.shape, weight, norm.eps)
    bias = None if norm.bias is None else norm.bias.detach().double()
    return F.layer_norm(x.double(), weight.shape, weight, bias, norm.eps)


def _spread(norm):
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn(parameter.shape) / 2)
    return norm


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_result_is_computed_in_fp32_and_rounded_once(kind, dtype, zero_centered):
    """Half an ulp of the result's dtype from the exact value; in a 16-bit dtype's own arithmetic it would be more."""
    norm = _spread(kind(37, eps=1e-3, zero_centered=zero_centered, dtype=dtype))
    x = (3 * torch.randn(50, 37) + 1).to(dtype)
    y, exact = norm(x), _exact(norm, x)
    assert y.dtype is dtype
    half_ulp = exact.abs() * torch.finfo(dtype).eps / 2
    assert ((y.double() - exact).abs() <= half_ulp * (1 + 2**-6) + 3e-6).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_gradients(kind, zero_centered):
    norm, x = _spread(kind(9, zero_centered=zero_centered)), torch.randn(5, 9, requires_grad=True)
    up = torch.randn(5, 9)
    norm(x).backward(up)
    exact_x = x.detach().double().requires_grad_()
    weights = [p.detach().double().requires_grad_() for p in norm.parameters()]
    gain = weights[0] + 1 if zero_centered else weights[0]
    if kind is RMSNorm:
        y = F.rms_norm(exact_x, (9,), gain, norm.eps)
    else:
        y = F.layer_norm(exact_x, (9,), gain, weights[1], norm.eps)
    y.backward(up.double())
    for ours, theirs in zip([x, *norm.parameters()], [exact_x, *weights], strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_centered_stores_the_weight_less_one(kind):
    plain, centered = kind(6), kind(6, zero_centered=True)
    assert torch.equal(plain.weight, torch.ones(6))
    assert torch.equal(centered.weight, torch.zeros(6))
    x = torch.randn(4, 6)
    with torch.no_grad():
        plain.weight += 0.25
        centered.weight += 0.25
    assert torch.equal(plain(x), centered(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast_the_input_keeps_its_dtype_and_the_next_layer_rounds_once(kind, dtype):
    norm, linear, x = _spread(kind(16)), torch.nn.Linear(16, 16, bias=False), torch.randn(8, 16).to(dtype)
    with torch.no_grad():
        linear.weight.copy_(torch.eye(16))
    with torch.autocast("cpu", torch.bfloat16):
        normed = norm(x)
        read = linear(normed)
    assert normed.dtype is dtype
    exact = _exact(norm, x)
    assert ((read.double() - exact).abs() <= exact.abs() * 2**-8 * (1 + 2**-6) + 1e-6).all()


def test_layernorm_without_bias_has_no_bias_parameter():
    assert list(LayerNorm(4, bias=False).state_dict()) == ["weight"]
    assert list(LayerNorm(4).state_dict()) == ["weight", "bias"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (8,)], ids=str)
def test_empty_and_single(kind, shape):
    x = torch.randn(shape, requires_grad=True)
    y = kind(8)(x)
    y.sum().backward()
    assert y.shape == shape


@pytest.mark.parametrize("kind", KINDS)
def test_refusals(kind):
    with pytest.raises(ConfigError, match="size must be a whole number"):
        kind(0)
    with pytest.raises(ConfigError, match="eps must be a positive"):
        kind(4, eps=0.0)
    with pytest.raises(ConfigError, match=r"this norm takes inputs \[\.\.\., 4\], not \(2, 1\)"):
        kind(4)(torch.zeros(2, 1))
    for dtype in (torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64):
        with pytest.raises(ConfigError, match=f"the input of a norm must be a float16, .*, not {dtype}"):
            kind(4)(torch.zeros(2, 4, dtype=dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_eps_must_be_one_in_fp32(kind):
    for eps in (1e-60, 1e-39, 1e39, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="eps must be a positive number that float32 holds"):
            kind(4, eps=eps)
    least = kind(4, eps=torch.finfo(torch.float32).tiny)
    assert torch.equal(least(torch.zeros(2, 4)), torch.zeros(2, 4))

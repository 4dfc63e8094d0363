"""torchao's INT8 called by hand, and its integer products taken in FP32."""

import sys

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from octavo.errors import ConfigError
from octavo.quantization.comparison.int8_baseline import K_CHUNK, ExactIntegerProducts, quantize_to_int8

LARGEST = 2 * K_CHUNK + 3


@given(
    m=st.integers(1, 20),
    k=st.sampled_from([1, 7, K_CHUNK, K_CHUNK + 1, LARGEST]),
    n=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_products_are_the_integers(m, k, n, seed):
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator) for shape in ((m, k), (k, n)))
    with ExactIntegerProducts():
        found = torch._int_mm(a, b)
    assert found.dtype == torch.int32
    assert torch.equal(found, a.int() @ b.int())


@pytest.mark.parametrize("low", [-128, 127])
def test_the_largest_sums_are_exact(low):
    a = torch.full((2, LARGEST), low, dtype=torch.int8)
    a[1, 0] += 1 if low < 0 else -1  # in a piece of full length: its sum is odd
    with ExactIntegerProducts():
        assert torch.equal(torch._int_mm(a, a.T), a.long() @ a.T.long())
        unsigned = torch.full((2, LARGEST), 255, dtype=torch.uint8)
        assert torch.equal(torch._int_mm(unsigned, a.T), (unsigned.long() @ a.T.long()).int())


@pytest.mark.parametrize("bias", [False, True])
def test_int8_layer_matches_torchao(bias):
    """Bit for bit, with and without the products in FP32; the input is rounded to BF16 first."""
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    config = quantization.Int8DynamicActivationInt8WeightConfig()
    plain = torch.nn.Sequential(torch.nn.Linear(96, 48, bias=bias)).bfloat16().requires_grad_(False)
    ours = torch.nn.Sequential(torch.nn.Linear(96, 48, bias=bias)).bfloat16().requires_grad_(False)
    ours.load_state_dict(plain.state_dict())
    quantization.quantize_(plain, config)
    quantize_to_int8(ours, ["0"])
    x = 3 * torch.randn(2, 20, 96)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), ExactIntegerProducts():
        found = ours(x)
    with torch.no_grad():
        assert torch.equal(found, plain(x.bfloat16()))


def test_other_layers_stay():
    pytest.importorskip("torchao", reason="torchao is not installed")
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)).bfloat16()
    quantize_to_int8(model, ["1"])
    assert type(model[0].weight) is torch.nn.Parameter
    assert model[0].weight.dtype == torch.bfloat16
    assert not model[0]._forward_pre_hooks


def test_missing_torchao_names_the_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ConfigError, match=r"pip install 'torchao>=0.18', or leave int8 out"):
        quantize_to_int8(torch.nn.Sequential(torch.nn.Linear(4, 4)), ["0"])

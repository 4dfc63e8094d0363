import pytest
import torch

from octavo.nn.activations import ACTIVATIONS
from tests.contract.transformer_oracle import FUNCTIONS, GATED, act


def test_the_oracle_knows_them_all():
    assert set(ACTIVATIONS) == FUNCTIONS.keys() | GATED.keys()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_and_gradients(name):
    x = (4 * torch.randn(3, 10, dtype=torch.float64)).requires_grad_()
    y, exact = ACTIVATIONS[name](x), act(name, x)
    assert ACTIVATIONS[name].gated == (name in GATED)
    assert y.shape == ((3, 5) if name in GATED else (3, 10))
    torch.testing.assert_close(y, exact)
    up = torch.randn_like(exact)
    torch.testing.assert_close(*(torch.autograd.grad(out, x, up)[0] for out in (y, exact)))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_dtype_stays(name, dtype):
    x = torch.randn(3, 10).to(dtype)
    y = ACTIVATIONS[name](x)
    assert y.dtype is dtype
    torch.testing.assert_close(y.double(), act(name, x.double()), rtol=2**-6, atol=2**-7)


def test_the_first_half_is_the_gate():
    x = torch.tensor([-1.0, 2.0, 10.0, 20.0])
    assert ACTIVATIONS["reglu"](x).tolist() == [0.0, 40.0]

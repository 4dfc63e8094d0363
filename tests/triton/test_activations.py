"""Activations with the cast of their result against torch, cast by octavo.numerics; gradients against float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octavo.kernels import fused_casts
from octavo.kernels.result_cast import ResultBuffers
from octavo.nn.activations import ACTIVATIONS
from tests.triton.fused_casts import CASTS, amax_of, assert_operands_of, assert_same_transpose, cast_by_torch

FUNCTIONS = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "qgelu": "qgelu",
    "relu": "relu",
    "silu": "silu",
    "srelu": "srelu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "qgeglu": "qgelu",
    "reglu": "relu",
    "sreglu": "srelu",
    "swiglu": "silu",
}
EXACT = ["relu", "srelu", "reglu", "sreglu"]
ROWS, COLUMNS = 9, 136
OVERFLOWS = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # NumPy's, in the interpreter


def _input(name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    width = COLUMNS * (2 if ACTIVATIONS[name].gated else 1)
    return (torch.randn(ROWS, width) * torch.logspace(-2, 1, ROWS)[:, None]).to(device, dtype)


def _made(name: str, x: Tensor, cast: str, *, amax: Tensor | None = None, scale: Tensor | None = None) -> ResultBuffers:
    gated = ACTIVATIONS[name].gated
    return fused_casts.cast_activation(x, FUNCTIONS[name], CASTS[cast], gated=gated, amax=amax, scale=scale)


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codes_of_functions_that_torch_computes_alike(
    name: str, cast: str, dtype: torch.dtype, device: torch.device
) -> None:
    x = _input(name, device, dtype)
    assert_operands_of(_made(name, x, cast), ACTIVATIONS[name](x).cpu(), CASTS[cast])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("cast", ["tensor", "row", "row, forward only"])
@pytest.mark.parametrize("largest", ["in the last row", "in the first row"])
def test_many_rows(largest: str, cast: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three and four rows a program, fewer for the last; some numbers of the first and the last are not finite."""
    for name, programs in (("_PROGRAMS", 3), ("_WITH_COLUMNS", 2)):
        monkeypatch.setattr(f"octavo.kernels.triton.activations.{name}", programs)
    x = _input("reglu", device, torch.float32)[:7]
    if largest == "in the first row":
        x = x.flip(0)
    x[0, 5], x[1, 6], x[6, COLUMNS + 7], x[6, 7] = float("nan"), float("inf"), -float("inf"), 1.0
    y = ACTIVATIONS["reglu"](x).cpu()
    assert (~y.isfinite()).sum() == 3
    assert_operands_of(_made("reglu", x, cast), y, CASTS[cast])


@OVERFLOWS
@pytest.mark.parametrize("cast", [name for name, cast in CASTS.items() if cast.transpose])
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_the_transpose_by_itself_is_that_of_both(name: str, cast: str, device: torch.device) -> None:
    x, gated = _input(name, device, torch.bfloat16), ACTIVATIONS[name].gated
    both, alone = _made(name, x, cast), replace(CASTS[cast], direct=False)
    made = fused_casts.cast_activation(x, FUNCTIONS[name], alone, gated=gated, amax=amax_of(both, alone))
    assert made.codes.numel() == 0
    assert_same_transpose(made, both, alone)


@OVERFLOWS
@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name not in EXACT])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codes_of_the_others_differ_where_the_last_bit_decides(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    x, given = _input(name, device, dtype), torch.tensor(0.05, device=device)
    made = _made(name, x, "tensor", scale=given)
    wanted = cast_by_torch(ACTIVATIONS[name](x), CASTS["tensor"], scale=given)
    ours, theirs = made.codes.float(), wanted.data.float()
    assert (ours != theirs).float().mean() < 0.002
    torch.testing.assert_close(ours, theirs, rtol=2**-3, atol=2**-9)  # one code apart
    assert torch.equal(made.transposed.view(torch.uint8), made.codes.view(torch.uint8).t())
    measurement = made.result(CASTS["tensor"], x.dtype, given).measurement
    assert measurement is not None
    torch.testing.assert_close(measurement.amax, ACTIVATIONS[name](x).abs().max().float(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("past", [0.0, 3.0])
def test_a_past_amax_scales_unless_it_is_zero(past: float, device: torch.device) -> None:
    x, amax = _input("reglu", device, torch.bfloat16), torch.tensor(past, device=device)
    made = _made("reglu", x, "tensor", amax=amax)
    assert_operands_of(made, ACTIVATIONS["reglu"](x).cpu(), CASTS["tensor"], amax=amax.cpu())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("past", [None, 0.0, 3.0])
def test_nonfinite_elements_are_counted_once(cast: str, past: float | None, device: torch.device) -> None:
    if past is not None and not cast.startswith("tensor"):
        pytest.skip("only a scale for the tensor has a past")
    x = _input("reglu", device, torch.float32)
    x[3, 5], x[4, 6], x[5, COLUMNS + 7], x[5, 7] = float("nan"), float("inf"), -float("inf"), 1.0
    y = ACTIVATIONS["reglu"](x).cpu()
    assert (~y.isfinite()).sum() == 3
    amax = None if past is None else torch.tensor(past, device=device)
    assert_operands_of(_made("reglu", x, cast, amax=amax), y, CASTS[cast], amax=None if amax is None else amax.cpu())


@OVERFLOWS
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients(name: str, dtype: torch.dtype, device: torch.device) -> None:
    x = _input(name, device, dtype)
    grad_y = torch.randn(ROWS, COLUMNS).to(device, dtype)
    made = fused_casts.activation_backward(grad_y, x, FUNCTIONS[name], gated=ACTIVATIONS[name].gated)
    exact = x.cpu().double().requires_grad_()
    (wanted,) = torch.autograd.grad(ACTIVATIONS[name](exact), exact, grad_y.cpu().double())
    assert made.dtype is dtype
    torch.testing.assert_close(made.cpu().double(), wanted, rtol=max(torch.finfo(dtype).eps, 1e-5), atol=1e-5)

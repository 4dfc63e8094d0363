"""Norms with the cast of their result against the norm in torch, cast by octavo.numerics; gradients against float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.kernels import fused_casts
from octavo.kernels.result_cast import NormSpec
from tests.triton.fused_casts import CASTS, amax_of, assert_operands_of, assert_same_transpose

KINDS = {
    "rmsnorm": NormSpec(layer=False, eps=1e-5, zero_centered=False),
    "rmsnorm, zero-centred": NormSpec(layer=False, eps=1e-5, zero_centered=True),
    "layernorm, zero-centred": NormSpec(layer=True, eps=1e-5, zero_centered=True),
}
WAYS = [
    ("rmsnorm", torch.bfloat16, torch.bfloat16),
    ("rmsnorm, zero-centred", torch.float32, torch.bfloat16),
    ("layernorm, zero-centred", torch.float32, torch.float32),
    ("layernorm, zero-centred", torch.float16, torch.float16),
]
SHAPE = 7, 200
TALL = 131, 70  # more than one block of rows, and of what a program takes


def _inputs(
    device: torch.device, dtype: torch.dtype, *, layer: bool, shape: tuple[int, int] = SHAPE
) -> tuple[Tensor, Tensor, Tensor | None]:
    x = torch.randn(shape) * torch.logspace(-2, 2, shape[0])[:, None] + 0.3
    gain, bias = torch.randn(shape[1]), torch.randn(shape[1]) if layer else None
    return x.to(device, dtype), gain.to(device), None if bias is None else bias.to(device, torch.bfloat16)


def _result(  # the kernels' operations in their order
    x: Tensor, gain: Tensor, bias: Tensor | None, mean: Tensor, rstd: Tensor, spec: NormSpec, dtype: torch.dtype
) -> Tensor:
    y = x.float() - mean[:, None] if spec.layer else x.float()
    y = y * rstd[:, None] * (gain.float() + 1 if spec.zero_centered else gain.float())
    return (y if bias is None else y + bias.float()).to(dtype)


def _double(x: Tensor) -> Tensor:
    return x.cpu().double()


def _exact(x: Tensor, gain: Tensor, bias: Tensor | None, spec: NormSpec) -> Tensor:
    """The norm in the inputs' own arithmetic."""
    weight = gain + 1 if spec.zero_centered else gain
    if spec.layer:
        return F.layer_norm(x, x.shape[-1:], weight, bias, spec.eps)
    return F.rms_norm(x, x.shape[-1:], weight, spec.eps)


@pytest.mark.parametrize("cast", [name for name, cast in CASTS.items() if cast.transpose])
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm, zero-centred"])
def test_the_transpose_by_itself_is_that_of_both(kind: str, cast: str, device: torch.device) -> None:
    spec, alone = KINDS[kind], replace(CASTS[cast], direct=False)
    inputs = _inputs(device, torch.bfloat16, layer=spec.layer)
    both, *_ = fused_casts.cast_norm(*inputs, spec, CASTS[cast], result_dtype=torch.bfloat16)
    made, *_ = fused_casts.cast_norm(*inputs, spec, alone, result_dtype=torch.bfloat16, amax=amax_of(both, alone))
    assert made.codes.numel() == 0
    assert_same_transpose(made, both, alone)


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize(("kind", "dtype", "result_dtype"), WAYS, ids=str)
def test_codes_are_those_of_the_norm_with_the_kernels_own_statistics(
    kind: str, dtype: torch.dtype, result_dtype: torch.dtype, cast: str, device: torch.device
) -> None:
    spec, asked = KINDS[kind], CASTS[cast]
    x, gain, bias = _inputs(device, dtype, layer=spec.layer)
    made, mean, rstd = fused_casts.cast_norm(x, gain, bias, spec, asked, result_dtype=result_dtype)
    y = _result(x, gain, bias, mean, rstd, spec, result_dtype)
    assert_operands_of(made, y.cpu(), asked)
    exact = _exact(_double(x), _double(gain), None if bias is None else _double(bias), spec)
    torch.testing.assert_close(_double(y), exact, rtol=torch.finfo(result_dtype).eps, atol=4e-6)


@pytest.mark.long
@pytest.mark.parametrize("cast", ["tensor", "row", "32 of a row, bytes", "128 of a row"])
def test_many_rows(cast: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_PROGRAMS", "_WITH_COLUMNS"):
        monkeypatch.setattr(f"octavo.kernels.triton.norms.{name}", 5)
    spec, asked = KINDS["rmsnorm"], CASTS[cast]
    x, gain, _ = _inputs(device, torch.bfloat16, layer=False, shape=TALL)
    made, mean, rstd = fused_casts.cast_norm(x, gain, None, spec, asked, result_dtype=torch.bfloat16)
    assert_operands_of(made, _result(x, gain, None, mean, rstd, spec, torch.bfloat16).cpu(), asked)


@pytest.mark.parametrize("past", [0.0, 3.0])
def test_a_past_amax_scales_unless_it_is_zero(past: float, device: torch.device) -> None:
    spec, cast = KINDS["rmsnorm"], CASTS["tensor"]
    x, gain, _ = _inputs(device, torch.bfloat16, layer=False)
    amax = torch.tensor(past, device=device)
    made, mean, rstd = fused_casts.cast_norm(x, gain, None, spec, cast, result_dtype=torch.bfloat16, amax=amax)
    y = _result(x, gain, None, mean, rstd, spec, torch.bfloat16)
    assert_operands_of(made, y.cpu(), cast, amax=amax.cpu())


def test_a_given_scale_scales(device: torch.device) -> None:
    spec, cast = KINDS["rmsnorm"], CASTS["tensor"]
    x, gain, _ = _inputs(device, torch.bfloat16, layer=False)
    scale = torch.tensor(0.013, device=device)
    made, mean, rstd = fused_casts.cast_norm(x, gain, None, spec, cast, result_dtype=torch.bfloat16, scale=scale)
    assert_operands_of(made, _result(x, gain, None, mean, rstd, spec, torch.bfloat16).cpu(), cast, scale=scale)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("cast", CASTS)
def test_nonfinite_elements_are_counted_and_stay_in_place(cast: str, device: torch.device) -> None:
    spec, asked = KINDS["rmsnorm"], CASTS[cast]
    x, gain, _ = _inputs(device, torch.float32, layer=False)
    x[3, 5] = float("nan")
    gain[7] = float("inf")
    gain[64:] = 0
    made, mean, rstd = fused_casts.cast_norm(x, gain, None, spec, asked, result_dtype=torch.float32)
    y = _result(x, gain, None, mean, rstd, spec, torch.float32).cpu()
    assert y.isnan().sum() == SHAPE[1]
    assert y.isinf().sum() == SHAPE[0] - 1
    assert_operands_of(made, y, asked)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients(kind: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.kernels.triton.norms._BACKWARD_PROGRAMS", 3)
    spec = KINDS[kind]
    x, gain, bias = _inputs(device, dtype, layer=spec.layer)
    grad_y = torch.randn(SHAPE).to(device, dtype)
    _, mean, rstd = fused_casts.cast_norm(x, gain, bias, spec, CASTS["row"], result_dtype=dtype)
    made = fused_casts.norm_backward(grad_y, x, gain, mean, rstd, spec, has_bias=bias is not None)
    exact = [_double(t).requires_grad_() for t in (x, gain, bias) if t is not None]
    y = _exact(exact[0], exact[1], exact[2] if bias is not None else None, spec)
    wanted = torch.autograd.grad(y, exact, _double(grad_y))
    assert [m.dtype for m in made] == [dtype, torch.float32, torch.float32]
    assert (made[2].numel() == 0) == (bias is None)
    for ours, theirs in zip(made, wanted, strict=False):
        eps = torch.finfo(ours.dtype).eps
        torch.testing.assert_close(_double(ours), theirs, rtol=eps, atol=8 * 2**-23 * float(theirs.abs().max()))


def test_sums_for_the_parameters_are_the_same_every_time(device: torch.device) -> None:
    spec = KINDS["layernorm, zero-centred"]
    x, gain, bias = _inputs(device, torch.bfloat16, layer=True)
    _, mean, rstd = fused_casts.cast_norm(x, gain, bias, spec, CASTS["row"], result_dtype=torch.bfloat16)
    first, second = (fused_casts.norm_backward(x, x, gain, mean, rstd, spec, has_bias=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

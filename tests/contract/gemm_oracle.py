"""What a product of quantized operands must be, and how far FP32 sums may lead from it: the one place of tolerances.

The oracle decodes both operands to float64, multiplies and adds there. Against it an implementation may err by

- its sums: K products of u = 2^-24 relative each, of the magnitudes' sum (Higham, "Accuracy and Stability of Numerical
  Algorithms", §3.1: any order of summation),
- two scale multiplications and a bias addition, one u each of the result,
- the one rounding to ``out_dtype``: half an ulp, or half the smallest subnormal.

A tensor core errs by more. For every 32 of K it cuts 33 terms and their sum at 13 fraction bits below the largest of
them, which is at most the magnitudes' sum: 34 · 2^-13 of it a step, wherever the chains end.

Torch's own BF16 GEMM may round the product to BF16 before it adds a bias, so twice: on an H100 it does for N = 303.

The recorder notes which operands reach a backend, so that codes and scales can be compared bit for bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.backend import MatmulProblem
from octavo.kernels.dispatch import BACKENDS
from octavo.numerics import QuantizedTensor

FP32_UNIT = 2.0**-24
TENSOR_CORE_UNIT, TENSOR_CORE_STEP = 34 * 2.0**-13, 32  # of K


@dataclass(frozen=True)
class Product:
    """One product that a backend was asked for."""

    a: QuantizedTensor
    b: QuantizedTensor
    problem: MatmulProblem
    backend: str


@contextmanager
def recorded_products() -> Iterator[list[Product]]:
    """Every product that any backend executes inside the block."""
    products: list[Product] = []
    with pytest.MonkeyPatch.context() as patch:
        for backend in BACKENDS:
            patch.setattr(type(backend), "scaled_mm", _recording(type(backend).scaled_mm, products))
        yield products


def _recording(original: Any, products: list[Product]) -> Any:
    def scaled_mm(
        self: Any, a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None, problem: MatmulProblem
    ) -> Any:
        products.append(Product(a, b, problem, self.name))
        return original(self, a, b, bias, problem)

    return scaled_mm


def decode(operand: QuantizedTensor | Tensor) -> Tensor:
    """Exact float64 values of an operand; a plain tensor is one in high precision."""
    if isinstance(operand, Tensor):
        return operand.double()
    rows, columns = operand.shape
    scale = operand.scale
    if scale.dtype is torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu).float()
    scale = scale.double()
    if scale.ndim == 2 and scale.shape != (rows, 1):  # blocks, written out
        high, wide = operand.granularity.rows, operand.granularity.columns  # type: ignore[attr-defined]
        index = (torch.arange(rows)[:, None] // high, torch.arange(columns)[None, :] // wide)
        scale = scale[index]
    return operand.data.double() * scale


def assert_product(
    actual: Tensor,
    a: QuantizedTensor | Tensor,
    b: QuantizedTensor | Tensor,
    bias: Tensor | None = None,
    *,
    tensor_core: bool = False,
    rounds_product: bool = False,
) -> None:
    """``actual`` is ``a @ b.T + bias`` with FP32 sums, or a tensor core's, and one rounding to its dtype.

    With ``rounds_product`` the product may have been rounded to its dtype before the bias was added.
    """
    left, right = decode(a), decode(b)
    exact = left @ right.t() + (0 if bias is None else bias.double())
    magnitudes = left.abs() @ right.abs().t()
    terms = left.shape[1] + 3
    sums = terms * FP32_UNIT * (magnitudes + exact.abs())
    if tensor_core:
        sums += -(-left.shape[1] // TENSOR_CORE_STEP) * TENSOR_CORE_UNIT * magnitudes
    if rounds_product and bias is not None:
        sums += _half_ulp((left @ right.t()).abs() + sums, actual.dtype)
    _assert_within(actual, exact, sums)


def _half_ulp(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """At most: of the largest number of a binade, for all of it."""
    info = torch.finfo(dtype)
    return torch.clamp(magnitude * info.eps / 2, min=info.smallest_normal * info.eps / 2)


def assert_row_sum(actual: Tensor, rows: Tensor) -> None:
    """``actual`` is the sum over the first dimension with FP32 additions and one rounding."""
    exact = rows.double().sum(dim=0)
    _assert_within(actual, exact, rows.shape[0] * FP32_UNIT * rows.double().abs().sum(dim=0))


def _assert_within(actual: Tensor, exact: Tensor, sums: Tensor) -> None:
    assert actual.shape == exact.shape
    half_ulp = _half_ulp(exact.abs() + sums, actual.dtype)
    finite = exact.isfinite() & (exact.abs() + sums + half_ulp <= torch.finfo(actual.dtype).max)
    error = (actual.double() - exact).abs()
    worst = torch.where(finite, error - sums - half_ulp, 0.0)
    assert not worst.isnan().any(), "an output is NaN where the exact product is finite"
    assert (worst <= 0).all(), f"worst excess {worst.max():.3e} at {int(worst.argmax())}"
    special = ~exact.isfinite()
    torch.testing.assert_close(actual.double()[special], exact[special], rtol=0, atol=0, equal_nan=True)


def assert_same_operand(actual: QuantizedTensor, expected: QuantizedTensor) -> None:
    """Codes, scales, format and granularity, bit for bit, but for the sign of a NaN code.

    The definition leaves it open, and a GPU's is not the CPU's: in E4M3 -NaN is 0x7F there and 0xFF here.
    """
    assert actual.data.dtype is expected.data.dtype
    assert actual.granularity == expected.granularity
    assert actual.scale.dtype is expected.scale.dtype
    broken = expected.data.float().isnan()
    assert torch.equal(actual.data.float().isnan(), broken)
    assert torch.equal(actual.data.view(torch.uint8)[~broken], expected.data.view(torch.uint8)[~broken])
    assert torch.equal(
        actual.scale.contiguous().view(-1).view(torch.uint8), expected.scale.contiguous().view(-1).view(torch.uint8)
    )

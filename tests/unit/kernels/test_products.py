"""What is looked at before a native product gets its addresses."""

import pytest
import torch

from octavo.errors import BackendError
from octavo.kernels import cpu, products
from octavo.numerics import Accumulate

pytestmark = pytest.mark.skipif(cpu.why_absent() is not None, reason=f"no native kernels: {cpu.why_absent()}")

A = torch.ones(4, 160).to(torch.float8_e4m3fn)
B = torch.ones(8, 160).to(torch.float8_e5m2)
ONE = torch.ones(1, 1)


def gemm(*, a=A, b=B, a_scale=ONE, b_scale=ONE, out_dtype=torch.float32, bias=None, block=0):
    return torch.ops.octavo.native_mm(a, a_scale, b, b_scale, bias, out_dtype, block)


def sums(*, a=A, b=B, accumulate="hopper-slow", a_scale=None, b_scale=None):
    return torch.ops.octavo.hopper_sums(a, b, accumulate, a_scale, b_scale)


@pytest.mark.parametrize("call", [
    lambda: gemm(b=B[:, :8]),
    lambda: gemm(a=A[0]),
    lambda: gemm(a=A.view(torch.uint8)),
    lambda: gemm(a=A.float().to(torch.float8_e4m3fnuz)),
    lambda: gemm(a=A[:, :0], b=B[:, :0]),
    lambda: gemm(a=A[:0]),
    lambda: gemm(a_scale=torch.ones(3, 1)),
    lambda: gemm(a_scale=torch.ones(1)),
    lambda: gemm(b_scale=torch.ones(8, 3), block=128),
    lambda: gemm(bias=torch.ones(7)),
    lambda: gemm(bias=torch.ones(8, 1)),
    lambda: gemm(block=-3),
    lambda: gemm(out_dtype=torch.int32),
    lambda: sums(b=B[:, :32]),
    lambda: sums(a=A.float()),
    lambda: sums(accumulate=Accumulate.FP32),
    lambda: sums(a_scale=torch.ones(2, 1), b_scale=ONE),
    lambda: sums(a_scale=torch.ones(4, 3), b_scale=ONE),
    lambda: sums(a_scale=ONE),
    lambda: sums(a_scale=ONE, b_scale=ONE, accumulate="hopper-fast"),
])  # fmt: skip
def test_operators_called_by_name_refuse_what_does_not_fit(call):
    with pytest.raises(BackendError):
        call()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_scales_of_other_dtypes_are_converted(dtype):
    a_scale, b_scale = torch.tensor([[0.5], [2.0], [1.0], [4.0]]), torch.tensor([[8.0]])
    plain = gemm(a_scale=a_scale, b_scale=b_scale)
    assert torch.equal(plain, gemm(a_scale=a_scale.to(dtype), b_scale=b_scale.to(dtype)))
    assert torch.equal(plain, 160 * 8 * a_scale.expand(4, 8))
    assert torch.equal(sums(a_scale=a_scale.to(dtype), b_scale=b_scale.to(dtype)), plain)


def test_numbers_are_read_as_they_are():
    negative = torch._neg_view(torch.ones(8))
    assert torch.equal(gemm(bias=negative), gemm(bias=-torch.ones(8)))
    x = torch._neg_view(torch.ones(4, 160))
    assert torch.equal(products.gemm(x, B, out_dtype=torch.float32), -160 * torch.ones(4, 8))


def test_no_products_give_zeros():
    assert torch.equal(sums(a=A[:, :0], b=B[:, :0]), torch.zeros(4, 8))

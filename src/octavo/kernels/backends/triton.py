"""Casts by octavo's own kernels on a GPU, and GEMMs where cuBLAS has none: most scales that change along K.

The GEMM stands in triton/gemm.py. It also multiplies E5M2 by E5M2, which cuBLAS refuses though the tensor cores do
not. It sums 128 of K, or what shares a scale if that is less, in a tensor core, and those sums in FP32: with
``accumulate="fp32"`` as with "hopper-slow".

In a traced graph a product is one operator, ``octavo::triton_mm``.
"""

from collections.abc import Iterator
from typing import Unpack

import torch
from torch import Tensor

import octavo.kernels.triton_bindings as triton_bindings
from octavo.formats import E4M3, E5M2
from octavo.kernels.backend import CastProblem, CastResult, MatmulProblem, ScaleSource, block_widths, product_shape
from octavo.kernels.cast_operators import traced_cast
from octavo.kernels.tracing import is_traced
from octavo.kernels.triton.launching import WHY_ABSENT
from octavo.numerics import Accumulate, AmaxRecord, CastSpec, Granularity, QuantizedTensor
from octavo.numerics.accumulate import CHAIN
from octavo.numerics.granularity import granularity_as_list, granularity_from_list

__all__ = ["TritonBackend", "TritonCast"]

_WIDTHS = (32, 64, CHAIN)


class TritonCast:
    """Casts to E4M3 and E5M2 on a GPU; the codes of a matrix and of its transpose are both contiguous."""

    name = "triton"

    def unsupported_reason(self, problem: CastProblem) -> str | None:
        """None for tensors on CUDA that round to nearest, and for their codes, with groups that fit a kernel's tile."""
        return triton_bindings.unsupported_reason(problem)

    def cast(
        self,
        x: Tensor,
        spec: CastSpec,
        *,
        transpose: bool = False,
        record: AmaxRecord | None = None,
        **source: Unpack[ScaleSource],
    ) -> CastResult:
        """Cast ``x``, its transpose if requested, and record what is measured."""
        run = traced_cast if is_traced(x) else triton_bindings.cast
        return run(x, spec, transpose=transpose, record=record, **source)

    def fake_quantize(self, x: Tensor, spec: CastSpec, *, out: Tensor | None = None) -> Tensor | None:
        """See :class:`octavo.kernels.backend.CastBackend`."""
        if is_traced(x) or not triton_bindings.fakes(x, spec.granularity):
            return None
        return triton_bindings.fake_quantize(x, spec, out=out)

    def dequantize(self, codes: Tensor, scale: Tensor, granularity: Granularity, out_dtype: torch.dtype) -> Tensor:
        """See :class:`octavo.kernels.backend.CastBackend`."""
        return triton_bindings.dequantize(codes, scale, granularity, out_dtype)


class TritonBackend:
    """E4M3 and E5M2 on a GPU of compute capability 9.0 or more; any rows share a scale, and 32, 64 or 128 of K."""

    name = "triton"

    def unsupported_reason(self, problem: MatmulProblem) -> str | None:
        """None for products of E4M3 and E5M2 on Hopper, unless scales change at other places along K."""
        return next(_unsupported_reasons(problem), None)

    def scaled_mm(self, a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None, problem: MatmulProblem) -> Tensor:
        """See :class:`octavo.kernels.backend.Backend`."""
        if not (is_traced(a.data) or is_traced(b.data)):  # the operator is the same function behind 20 µs of dispatch
            return _product(a, b, bias, problem.out_dtype)
        result: Tensor = torch.ops.octavo.triton_mm(
            *(a.data, a.scale, granularity_as_list(a.granularity)),
            *(b.data, b.scale, granularity_as_list(b.granularity)),
            *(bias, problem.out_dtype),
        )
        return result


def _unsupported_reasons(problem: MatmulProblem) -> Iterator[str]:
    if problem.device != "cuda":
        yield f"it runs on CUDA, and the operands are on {problem.device}"
        return  # asking for the capability would start CUDA
    if WHY_ABSENT is not None:
        yield WHY_ABSENT
    major, minor = torch.cuda.get_device_capability()
    if major < 9:
        yield f"it is written for Hopper, compute capability 9.0, and this device has {major}.{minor}"
    if {problem.a_dtype, problem.b_dtype} - {E4M3.torch_dtype, E5M2.torch_dtype}:
        yield "it multiplies E4M3 and E5M2"
    widths = sorted(width for width in block_widths(problem) if width < problem.k)
    if len(widths) > 1:
        yield f"its blocks of K are as wide in both operands, not {' and '.join(map(str, widths))}"
    if set(widths) - set(_WIDTHS):
        yield f"its blocks of K are {', '.join(map(str, _WIDTHS))} wide, not {widths[0]}"
    yield from _unsupported_sum_reasons(problem.accumulate, widths)
    if 0 in (problem.m, problem.n, problem.k):
        yield "an empty operand has no product"
    if problem.needs_grad:
        yield "its kernels have no gradient, and a scale or the bias requires one"


def _unsupported_sum_reasons(accumulate: Accumulate, widths: list[int]) -> Iterator[str]:
    if accumulate is Accumulate.FP32:
        return
    major, minor = torch.cuda.get_device_capability()
    if major != 9:
        yield f"only Hopper sums as Hopper does, and this device has compute capability {major}.{minor}"
    if widths and widths != [CHAIN]:
        yield f"Hopper's sums can be scaled every {CHAIN} of K, not every {widths[0]}"
    if accumulate is Accumulate.HOPPER_FAST and not widths:
        yield f"it starts a fresh chain every {CHAIN} of K"


def _product(a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    from octavo.kernels.triton import gemm

    return gemm.product(a, b, bias, out_dtype)


def _triton_mm(  # noqa: PLR0917 (an operator's schema)
    a: Tensor,
    a_scale: Tensor,
    a_granularity: list[int],
    b: Tensor,
    b_scale: Tensor,
    b_granularity: list[int],
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    a_operand = QuantizedTensor(a, a_scale, granularity_from_list(a_granularity), out_dtype)
    b_operand = QuantizedTensor(b, b_scale, granularity_from_list(b_granularity), out_dtype)
    return _product(a_operand, b_operand, bias, out_dtype)


torch.library.define(
    "octavo::triton_mm",
    "(Tensor a, Tensor a_scale, int[] a_granularity, Tensor b, Tensor b_scale, int[] b_granularity, Tensor? bias, "
    "ScalarType out_dtype) -> Tensor",
)
torch.library.impl("octavo::triton_mm", "CUDA")(_triton_mm)
torch.library.register_fake("octavo::triton_mm")(product_shape)

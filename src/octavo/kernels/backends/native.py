"""Casts and GEMMs of E4M3 and E5M2 by the native kernels on a CPU.

A GEMM decodes codes into cached panels, sums in FP32, scales and rounds once.
"""

from collections.abc import Iterator
from typing import Unpack

import torch
from torch import Tensor

import octavo.kernels.native_bindings as native_bindings
import octavo.kernels.native_gemm as native_gemm
from octavo.kernels.backend import (
    CastProblem,
    CastResult,
    MatmulProblem,
    ScaleSource,
    block_widths,
    product_shape,
)
from octavo.kernels.backends.torch_cpu import CpuBackend
from octavo.kernels.cast_operators import traced_cast
from octavo.kernels.tracing import is_traced
from octavo.numerics import AmaxRecord, CastSpec, Granularity, QuantizedTensor
from octavo.numerics.quantized import rows_of_scales

__all__ = ["NativeBackend", "NativeCast"]

_TORCH = CpuBackend()


class NativeCast:
    """Casts to E4M3 and E5M2 on a CPU, with any of octavo's scales."""

    name = "native"

    def unsupported_reason(self, problem: CastProblem) -> str | None:
        """None for tensors on a CPU that round to nearest, and for their codes, if the extension was built."""
        return native_bindings.unsupported_reason(problem)

    def cast(
        self,
        x: Tensor,
        spec: CastSpec,
        *,
        transpose: bool = False,
        record: AmaxRecord | None = None,
        **source: Unpack[ScaleSource],
    ) -> CastResult:
        """Cast ``x`` alone: the codes of a transpose are a view, or another call."""
        if is_traced(x):
            return traced_cast(x, spec, record=record, **source)
        return native_bindings.cast(x, spec, **source)

    def fake_quantize(self, x: Tensor, spec: CastSpec, *, out: Tensor | None = None) -> Tensor | None:
        """See :class:`octavo.kernels.backend.CastBackend`; the kernel writes the dtypes that it also decodes to."""
        if x.dtype not in native_bindings.DTYPES or is_traced(x):
            return None
        return native_bindings.fake_quantize(x, spec, out=out)

    def dequantize(self, codes: Tensor, scale: Tensor, granularity: Granularity, out_dtype: torch.dtype) -> Tensor:
        """See :class:`octavo.kernels.backend.CastBackend`."""
        return native_bindings.dequantize(codes, scale, granularity, out_dtype)


class NativeBackend:
    """E4M3 and E5M2 on a CPU, any of octavo's scales."""

    name = "native"

    def unsupported_reason(self, problem: MatmulProblem) -> str | None:
        """None for FP32 sums of E4M3 and E5M2 codes on a CPU, if the extension was built."""
        return next(_unsupported_reasons(problem), None)

    def scaled_mm(self, a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None, problem: MatmulProblem) -> Tensor:
        """See :class:`octavo.kernels.backend.Backend`."""
        a_scale, b_scale, out_dtype = rows_of_scales(a), rows_of_scales(b), problem.out_dtype
        block = max(block_widths(problem), default=0)
        if is_traced(a.data, a.scale, b.data, b.scale, bias):  # eager calls save the operator's 20 µs of dispatch
            result: Tensor = torch.ops.octavo.native_mm(a.data, a_scale, b.data, b_scale, bias, out_dtype, block)
            return result
        return native_gemm.gemm(
            a.data, b.data, a_scale=a_scale, b_scale=b_scale, out_dtype=out_dtype, bias=bias, block=block
        )


def _unsupported_reasons(problem: MatmulProblem) -> Iterator[str]:
    if (reason := _TORCH.unsupported_reason(problem)) is not None:  # the limits of any FP32 sums on a CPU
        yield reason
    if (absence := native_bindings.why_absent()) is not None:
        yield f"there are no native kernels: {absence}"
    if not native_bindings.knows(problem.a_dtype, problem.b_dtype):
        yield "it multiplies E4M3 and E5M2"
    if 0 in (problem.m, problem.n, problem.k):
        yield "an empty operand has no product"
    if problem.needs_grad:
        yield "its kernels have no gradient, and a scale or the bias requires one"


def _native_mm(  # noqa: PLR0917 (an operator's schema)
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype, block: int
) -> Tensor:
    return native_gemm.gemm(a, b, a_scale=a_scale, b_scale=b_scale, out_dtype=out_dtype, bias=bias, block=block)


torch.library.define(
    "octavo::native_mm",
    "(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias, ScalarType out_dtype, int block) -> Tensor",
)
torch.library.impl("octavo::native_mm", "CPU")(_native_mm)
torch.library.register_fake("octavo::native_mm")(product_shape)

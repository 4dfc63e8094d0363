"""Casts and GEMMs of E4M3 and E5M2 by the native kernels on a CPU.

A GEMM decodes codes into cached panels, sums in FP32, scales and rounds once.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

import octavo.kernels.native_bindings as native_bindings
import octavo.kernels.native_gemm as native_gemm
from octavo.kernels.backend import (
    CastProblem,
    CastResult,
    MatmulProblem,
    block_widths,
    cast_with_transpose,
    product_shape,
)
from octavo.kernels.backends.torch_cpu import CpuBackend
from octavo.kernels.cast_operators import traced_cast
from octavo.kernels.tracing import is_traced
from octavo.numerics import CastSpec, QuantizedTensor, Record
from octavo.numerics.quantized import rows_of_scales

__all__ = ["NativeBackend", "NativeCast"]

_TORCH = CpuBackend()


class NativeCast:
    """Casts to E4M3 and E5M2 on a CPU, with any of octavo's scales."""

    name = "native"

    def unsupported_reason(self, problem: CastProblem) -> str | None:
        """None for tensors on a CPU that round to nearest, where the extension is there."""
        return native_bindings.unsupported_reason(problem)

    def cast(
        self,
        x: Tensor,
        spec: CastSpec,
        *,
        amax: Tensor | None = None,
        scale: Tensor | None = None,
        measure_if_zero: bool = False,
        transpose: bool = False,
        into: Record | None = None,
    ) -> CastResult:
        """See :class:`octavo.kernels.backend.CastBackend`."""

        def cast_one(x: Tensor, into: Record | None) -> CastResult:
            if is_traced(x):
                return traced_cast(
                    x, spec, amax=amax, scale=scale, measure_if_zero=measure_if_zero, transpose=False, into=into
                )
            return native_bindings.cast(x, spec, amax=amax, scale=scale, measure_if_zero=measure_if_zero)

        return cast_with_transpose(cast_one, x, into) if transpose else cast_one(x, into)


class NativeBackend:
    """E4M3 and E5M2 on a CPU, any of octavo's scales."""

    name = "native"

    def unsupported_reason(self, problem: MatmulProblem) -> str | None:
        """None for FP32 sums of E4M3 and E5M2 codes on a CPU, where the extension is there."""
        return next(_unsupported_reasons(problem), None)

    def scaled_mm(self, a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None, problem: MatmulProblem) -> Tensor:
        """See :class:`octavo.kernels.backend.Backend`."""
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (a.scale, b.scale, bias)):
            return _TORCH.scaled_mm(a, b, bias, problem)  # its operations have gradients
        traced = is_traced(a.data, a.scale, b.data, b.scale, bias)
        # The operator is the same function behind 20 µs of dispatch.
        multiply = torch.ops.octavo.native_mm if traced else _native_mm
        block = max(block_widths(problem), default=0)
        result: Tensor = multiply(a.data, rows_of_scales(a), b.data, rows_of_scales(b), bias, problem.out_dtype, block)
        return result


def _unsupported_reasons(problem: MatmulProblem) -> Iterator[str]:
    if (reason := _TORCH.unsupported_reason(problem)) is not None:  # the limits of any FP32 sums on a CPU
        yield reason
    if (absence := native_bindings.why_absent()) is not None:
        yield f"there are no native kernels: {absence}"
    if not native_bindings.knows(problem.a_dtype, problem.b_dtype):
        yield "it multiplies E4M3 and E5M2"
    if 0 in (problem.m, problem.n, problem.k):
        yield "an empty operand has no product"


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

"""Slow, obvious backends: a cast by octavo.numerics, and a GEMM that decodes to float64, multiplies, rounds once.

They support every granularity, device and shape, but no tensor core's sums. Every other backend is compared with them.
"""

from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from octavo.kernels.backend import CastProblem, CastResult, MatmulProblem, ScaleSource
from octavo.numerics import (
    Accumulate,
    AmaxRecord,
    CastSpec,
    Granularity,
    QuantizedTensor,
    Scaling,
    measure,
    quantize_as,
)
from octavo.numerics.granularity import granularity_as_list
from octavo.numerics.quantized import cast_by_torch, dequantize_by_torch

__all__ = ["ReferenceBackend", "ReferenceCast"]


class ReferenceBackend:
    """Float64 sums of exactly decoded operands."""

    name = "reference"

    def unsupported_reason(self, problem: MatmulProblem) -> str | None:
        """None for every product with FP32 sums."""
        return None if problem.accumulate is Accumulate.FP32 else "it sums in float64, not as a tensor core does"

    def scaled_mm(self, a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None, problem: MatmulProblem) -> Tensor:
        """See :class:`octavo.kernels.backend.Backend`."""
        product = _decode(a) @ _decode(b).t()
        return (product if bias is None else product + bias.double()).to(problem.out_dtype)


def _decode(q: QuantizedTensor) -> Tensor:
    return q.data.double() * q.granularity.expand(q.fp32_scale.double(), q.shape)


class ReferenceCast:
    """Casts by torch's operations: every format, granularity, rounding, device, shape and engine."""

    name = "reference"

    def unsupported_reason(self, problem: CastProblem) -> str | None:
        """None."""
        return None

    def cast(
        self,
        x: Tensor,
        spec: CastSpec,
        *,
        transpose: bool = False,
        record: AmaxRecord | None = None,
        **source: Unpack[ScaleSource],
    ) -> CastResult:
        """Cast ``x`` alone."""
        measurement, amax = measure(x.detach(), spec.granularity), source.get("amax")
        if amax is not None and source.get("measure_if_zero"):
            amax = torch.where(amax > 0, amax, measurement.amax)
        scale = source.get("scale")
        if (engine := spec.engine) is not None:
            if amax is None and scale is None:
                engine = replace(engine, scaling=Scaling.DYNAMIC)  # a scale from elsewhere is not known yet
            return CastResult(quantize_as(x, engine, amax=amax, scale=scale), None, measurement)
        output = cast_by_torch(x, spec, amax=amax, scale=scale, measurement=measurement)
        return CastResult(output, None, measurement)

    def fake_quantize(self, x: Tensor, spec: CastSpec, *, out: Tensor | None = None) -> Tensor | None:
        """Return None: values are decoded from codes."""
        return None

    def dequantize(self, codes: Tensor, scale: Tensor, granularity: Granularity, out_dtype: torch.dtype) -> Tensor:
        """The formula by torch's operations."""
        return dequantize_by_torch(codes, scale, granularity_as_list(granularity), out_dtype)

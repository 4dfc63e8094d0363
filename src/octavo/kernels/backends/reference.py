"""The slow, obvious backend: decode to float64, multiply, add, round once.

It supports every granularity, device and shape, but no tensor core's sums. Every other backend is compared with it.
"""

from torch import Tensor

from octavo.kernels.backend import MatmulProblem
from octavo.numerics import Accumulate, QuantizedTensor

__all__ = ["ReferenceBackend"]


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

"""The sums of Hopper's tensor cores on any device, bit for bit, to compute what the hardware would.

Sums are those of numerics/accumulate.py, or on a CPU of the native kernel, with the same bits; this module applies the
scales. Block scales 128 wide meet their sums where ``hopper-slow`` starts a fresh chain anyway: each
chain is scaled, then added in FP32. Hopper cannot chain across a change of scale, so both ways of summing are one
there.

In a traced graph the native sums are one operator, ``octavo::hopper_sums``.
"""

import torch
from torch import Tensor

import octavo.kernels.native_bindings as native_bindings
import octavo.kernels.native_gemm as native_gemm
from octavo.formats import E4M3, E5M2
from octavo.kernels.backend import MatmulProblem, block_widths
from octavo.kernels.tracing import is_traced
from octavo.numerics import Accumulate, PerBlock, QuantizedTensor, hopper_chains, hopper_sums
from octavo.numerics.accumulate import CHAIN
from octavo.numerics.quantized import rows_of_scales

__all__ = ["HopperModelBackend"]


class HopperModelBackend:
    """Tensor-core sums, made of exact operations."""

    name = "hopper_model"

    def unsupported_reason(self, problem: MatmulProblem) -> str | None:
        """None for E4M3 and E5M2 with per-tensor, per-row or 128-wide block scales."""
        if problem.accumulate is Accumulate.FP32:
            return "it sums as a tensor core does, and FP32 sums were asked for"
        if {problem.a_dtype, problem.b_dtype} - {E4M3.torch_dtype, E5M2.torch_dtype}:
            return "Hopper multiplies E4M3 and E5M2"
        if (widths := block_widths(problem)) - {CHAIN}:
            return f"Hopper's sums can be scaled every {CHAIN} of K, not every {min(widths)}"
        return None

    def scaled_mm(self, a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None, problem: MatmulProblem) -> Tensor:
        """See :class:`octavo.kernels.backend.Backend`."""
        a_scale, b_scale = rows_of_scales(a), rows_of_scales(b)
        if isinstance(a.granularity, PerBlock) or isinstance(b.granularity, PerBlock):
            add = _sums_by_torch if problem.scale_needs_grad else _sums  # kernels have no gradient for a scale
            sums = add(a.data, b.data, Accumulate.HOPPER_SLOW, a_scale, b_scale)
        else:
            sums = _sums(a.data, b.data, problem.accumulate) * a_scale.double() * b_scale.double().t()
        return (sums if bias is None else sums + bias.float()).to(problem.out_dtype)


def _sums(
    a: Tensor, b: Tensor, accumulate: Accumulate, a_scale: Tensor | None = None, b_scale: Tensor | None = None
) -> Tensor:
    """Hopper's sums; where scales are given, each chain is multiplied by its two before it is added."""
    if a.device.type != "cpu" or native_bindings.why_absent() is not None:
        return _sums_by_torch(a, b, accumulate, a_scale, b_scale)
    traced = is_traced(a, b, a_scale, b_scale)
    add = torch.ops.octavo.hopper_sums if traced else _native_sums
    result: Tensor = add(a, b, str(accumulate), a_scale, b_scale)
    return result


def _sums_by_torch(
    a: Tensor, b: Tensor, accumulate: Accumulate, a_scale: Tensor | None, b_scale: Tensor | None
) -> Tensor:
    if a_scale is None or b_scale is None:
        return hopper_sums(a, b, accumulate=accumulate)
    left, right = a_scale.double(), b_scale.double()
    sums = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    for block, chain in enumerate(hopper_chains(a, b)):
        sums += (chain * _column(left, block) * _column(right, block).t()).float()
    return sums


def _column(scales: Tensor, block: int) -> Tensor:
    """The scales of one block of K, [R, 1]; a scale for the whole of K serves every block."""
    return scales if scales.shape[1] == 1 else scales[:, block : block + 1]


def _native_sums(a: Tensor, b: Tensor, accumulate: str, a_scale: Tensor | None, b_scale: Tensor | None) -> Tensor:
    return native_gemm.hopper_sums(a, b, accumulate=Accumulate(accumulate), a_scale=a_scale, b_scale=b_scale)


def _shape_of_sums(a: Tensor, b: Tensor, *_: object) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=torch.float32)


torch.library.define(
    "octavo::hopper_sums", "(Tensor a, Tensor b, str accumulate, Tensor? a_scale, Tensor? b_scale) -> Tensor"
)
torch.library.impl("octavo::hopper_sums", "CPU")(_native_sums)
torch.library.register_fake("octavo::hopper_sums")(_shape_of_sums)

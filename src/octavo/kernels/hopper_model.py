"""The sums of Hopper's tensor cores on any device, to the bit: for asking what the hardware would have computed.

The accumulation itself is numerics/accumulate.py's; here are the scales around it. Block scales 128 wide meet their
sums where ``hopper-slow`` starts a fresh chain anyway: each chain is scaled, then added in FP32. Hopper cannot chain
across a change of scale, so both ways of summing are one there.
"""

import torch
from torch import Tensor

from octavo.formats import E4M3, E5M2
from octavo.kernels.backend import MatmulProblem, block_widths, rows_of_scales
from octavo.numerics import Accumulate, PerBlock, QuantizedTensor, hopper_chains, hopper_sums
from octavo.numerics.accumulate import CHAIN

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
        a_scale, b_scale = rows_of_scales(a).double(), rows_of_scales(b).double()
        if isinstance(a.granularity, PerBlock) or isinstance(b.granularity, PerBlock):
            sums = torch.zeros(problem.m, problem.n, device=a.data.device)
            for block, chain in enumerate(hopper_chains(a.data, b.data)):
                sums += (chain * _column(a_scale, block) * _column(b_scale, block).t()).float()
        else:
            sums = hopper_sums(a.data, b.data, accumulate=problem.accumulate) * a_scale * b_scale.t()
        return (sums if bias is None else sums + bias.float()).to(problem.out_dtype)


def _column(scales: Tensor, block: int) -> Tensor:
    """The scales of one block of K, [R, 1]; a scale for the whole of K serves every block."""
    return scales if scales.shape[1] == 1 else scales[:, block : block + 1]

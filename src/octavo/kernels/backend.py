"""What a backend is: something that can multiply quantized operands and says beforehand which it cannot.

``numerics/`` defines what comes out, a backend only how fast. Each one answers ``unsupported_reason(problem)`` with a
sentence or None, so that a choice can always be explained, and a backend that was asked for by name can refuse with its
reason instead of falling back.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from octavo.numerics import Accumulate, Granularity, PerBlock, QuantizedTensor

__all__ = ["Backend", "MatmulProblem", "block_widths", "product_shape", "rows_of_scales"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulProblem:
    """Everything a backend may ask about ``y = a @ b.T``: not the numbers, only their description.

    Attributes:
        m, n, k: a is [m, k], b is [n, k], y is [m, n].
        device: device type, such as "cpu".
        a_dtype, b_dtype: dtypes of the codes.
        a_granularity, b_granularity: scaling groups of the operands.
        out_dtype: dtype of y.
        bias: whether a bias is added before y is rounded.
        accumulate: how the products must be added.
        fast_accumulation: whether a GPU may keep fewer bits while it adds; a hint, where ``accumulate`` is FP32.
    """

    m: int
    n: int
    k: int
    device: str
    a_dtype: torch.dtype
    b_dtype: torch.dtype
    a_granularity: Granularity
    b_granularity: Granularity
    out_dtype: torch.dtype
    bias: bool
    accumulate: Accumulate
    fast_accumulation: bool = False


class Backend(Protocol):
    """Executes :func:`octavo.scaled_mm` for the problems it supports."""

    @property
    def name(self) -> str:
        """The word users select it by."""
        ...

    def unsupported_reason(self, problem: MatmulProblem) -> str | None:
        """Why this problem cannot run here, as a clause; None when it can."""
        ...

    def scaled_mm(self, a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None, problem: MatmulProblem) -> Tensor:
        """``(a.data @ b.data.T) · a.scale · b.scale.T + bias``: summed as ``accumulate`` says, rounded once."""
        ...


def rows_of_scales(q: QuantizedTensor) -> Tensor:
    """A matrix's scales as float32 [R, blocks of K], one row for each row of codes (1 row for a per-tensor scale).

    Example:
        >>> from octavo import E4M3, PerBlock
        >>> from octavo.numerics import quantize
        >>> rows_of_scales(quantize(torch.ones(3, 300), E4M3, granularity=PerBlock(2, 128))).shape
        torch.Size([3, 3])
    """
    scale = q.fp32_scale
    if isinstance(q.granularity, PerBlock):
        if q.granularity.rows == 1:
            return scale
        return scale.repeat_interleave(min(q.granularity.rows, q.shape[0]), dim=0)[: q.shape[0]]
    return scale.reshape(-1, 1)


def block_widths(problem: MatmulProblem) -> set[int]:
    """How wide along K the blocks are that share a scale; empty where the scales apply to the finished sums."""
    return {g.columns for g in (problem.a_granularity, problem.b_granularity) if isinstance(g, PerBlock)}


def product_shape(a: Tensor, *rest: object) -> Tensor:
    """What a product's operator, of a, its scale, b [.., N, K] and more, gives a tracer: [M, N] of its one dtype."""
    _, b, *_ = (given for given in rest if isinstance(given, Tensor))
    (out_dtype,) = (given for given in rest if isinstance(given, torch.dtype))
    return a.new_empty((a.shape[0], b.shape[-2]), dtype=out_dtype)

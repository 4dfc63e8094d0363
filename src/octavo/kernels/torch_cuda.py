"""FP8 products by cuBLAS, through ``torch._scaled_mm``: per-tensor and per-row scales.

cuBLAS wants both operands with K contiguous and their sizes in multiples of 16. Others are copied with zero codes
added, which take no part in the scales, and what comes of them is cut off again. It sums as the tensor cores do:
octavo.numerics' accumulate.py has the two ways, and ``fast_accumulation`` chooses between them.

A bias of the result's own 16-bit dtype is added by cuBLAS, before its only rounding. Any other is added here, to FP32
sums.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.formats import E4M3, E5M2
from octavo.kernels.backend import MatmulProblem, block_widths, rows_of_scales
from octavo.numerics import Accumulate, PerRow, QuantizedTensor

__all__ = ["CudaBackend"]

_MULTIPLE = 16
_CUDA = tuple(int(part) for part in (torch.version.cuda or "0").split("."))
_PER_ROW_SINCE = (12, 9)  # where cuBLAS has per-row scales itself; kernels of torch's serve older releases


class CudaBackend:
    """cuBLAS, or torch's own kernel for per-row scales on devices for which cuBLAS has none.

    That kernel writes bfloat16 and nothing else. Below compute capability 9.0, where nobody else multiplies, other
    results are rounded to bfloat16 on the way.
    """

    name = "torch_cuda"

    def unsupported_reason(self, problem: MatmulProblem) -> str | None:
        """None for the pairs of formats and scales that cuBLAS multiplies."""
        return next(_objections(problem), None)

    def scaled_mm(self, a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None, problem: MatmulProblem) -> Tensor:
        """See :class:`octavo.kernels.backend.Backend`."""
        per_row = _is_per_row(problem)
        left, right = _pad_to_16(a.data, rows=False), _pad_to_16(b.data, rows=True)
        extra = right.shape[0] - problem.n
        a_scale, b_scale = a.fp32_scale, b.fp32_scale
        if per_row:
            a_scale = rows_of_scales(a).expand(problem.m, 1).contiguous()
            b_scale = _extended(rows_of_scales(b).expand(problem.n, 1).contiguous().view(-1), extra)[None, :]
        added_there = bias is not None and _takes_bias(bias, problem)
        product = torch._scaled_mm(
            left,
            right.t(),
            scale_a=a_scale,
            scale_b=b_scale,
            bias=_extended(bias, extra) if bias is not None and added_there else None,
            out_dtype=_written(problem, sums=bias is not None and not added_there),
            use_fast_accum=problem.fast_accumulation or problem.accumulate is Accumulate.HOPPER_FAST,
        )
        if extra:
            product = product[:, : problem.n]
        if bias is not None and not added_there:
            product = product.float() + bias.float()
        return product.to(problem.out_dtype).contiguous()


def _objections(problem: MatmulProblem) -> Iterator[str]:
    if problem.device != "cuda":
        yield f"it runs on CUDA, and the operands are on {problem.device}"
        return  # asking for the capability would start CUDA
    capability = torch.cuda.get_device_capability()
    if capability < (8, 9):
        yield f"FP8 tensor cores need compute capability 8.9, and this device has {capability[0]}.{capability[1]}"
    if block_widths(problem):
        yield "cuBLAS here takes per-tensor and per-row scales, not block scales"
    if problem.accumulate is not Accumulate.FP32 and capability[0] != 9:
        yield f"only Hopper sums as Hopper does, and this device has compute capability {capability[0]}.{capability[1]}"
    if problem.a_dtype is torch.float8_e5m2 and problem.b_dtype is torch.float8_e5m2:
        yield "cuBLAS does not multiply E5M2 by E5M2"
    if {problem.a_dtype, problem.b_dtype} - {E4M3.torch_dtype, E5M2.torch_dtype}:
        yield "FNUZ formats have no tensor core here"
    if 0 in (problem.m, problem.n, problem.k):
        yield "an empty operand has no product"
    if capability >= (9, 0) and _written(problem, sums=problem.bias) is not _wanted(problem, sums=problem.bias):
        yield f"with per-row scales it would round to bfloat16 before {problem.out_dtype} or a bias"


def _is_per_row(problem: MatmulProblem) -> bool:
    return PerRow() in (problem.a_granularity, problem.b_granularity)


def _wanted(problem: MatmulProblem, *, sums: bool) -> torch.dtype:
    """What the product must be written in, so that y is rounded once."""
    return torch.float32 if sums else problem.out_dtype


def _written(problem: MatmulProblem, *, sums: bool) -> torch.dtype:
    """What it is written in."""
    by_cublas = _CUDA >= _PER_ROW_SINCE and torch.cuda.get_device_capability()[0] == 9
    return _wanted(problem, sums=sums) if by_cublas or not _is_per_row(problem) else torch.bfloat16


def _takes_bias(bias: Tensor, problem: MatmulProblem) -> bool:
    """Whether cuBLAS adds the bias; it has no gradient."""
    if (bias.requires_grad and torch.is_grad_enabled()) or bias.dtype is torch.float32:
        return False
    return bias.dtype is problem.out_dtype is _written(problem, sums=False)


def _pad_to_16(codes: Tensor, *, rows: bool) -> Tensor:
    """Codes [R, K] row after row, zeros added to K and, if asked, to R, up to multiples of 16."""
    row_padding = -codes.shape[0] % _MULTIPLE if rows else 0
    column_padding = -codes.shape[1] % _MULTIPLE
    if row_padding or column_padding:
        padded = torch.nn.functional.pad(codes.view(torch.uint8), (0, column_padding, 0, row_padding))
        return padded.view(codes.dtype)
    if codes.stride() == (codes.shape[1], 1):
        return codes
    return codes.contiguous().flatten().view(codes.shape)  # a single row's stride, which may be anything, too


def _extended(vector: Tensor, extra: int) -> Tensor:
    return torch.nn.functional.pad(vector, (0, extra)) if extra else vector

"""FP8 GEMM by cuBLAS, through ``torch._scaled_mm``: scales per tensor, per row and, on Hopper, per block.

cuBLAS requires both operands with K contiguous and sizes in multiples of 16. Others are copied and padded with zero
codes, which do not affect the scales, and the padding of the result is cut off. It sums as the tensor cores do:
octavo.numerics' accumulate.py has the two ways, and ``fast_accumulation`` chooses between them. Codes and scales must
begin at a multiple of 16 bytes.

Blocks are 1x128 and 128x128, the latter on one side at most. Scales of 1x128 lie column after column, those of 128x128
row after row. The sums of every block are scaled and added in FP32. In a traced graph such a product is one operator,
``octavo::cublas_block_mm``, since the tracer's own description of ``torch._scaled_mm`` refuses block scales.

A bias of the result's own 16-bit dtype is added by cuBLAS, before its only rounding. Any other is added here, to FP32
sums.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.formats import E4M3, E5M2
from octavo.kernels.backend import MatmulProblem, block_widths, product_shape
from octavo.kernels.tracing import is_traced
from octavo.numerics import Accumulate, PerBlock, PerRow, QuantizedTensor
from octavo.numerics.quantized import rows_of_scales

__all__ = ["CudaBackend"]

_MULTIPLE = 16
_CUDA = tuple(int(part) for part in (torch.version.cuda or "0").split("."))
_VECTORS_SINCE = (12, 9)  # where cuBLAS has scales per row, which kernels of torch's serve before, and per block
_BLOCKS = (PerBlock(1, 128), PerBlock(128, 128))
_SQUARES_OF_K = 512  # four scales of 128x128: a row of them begins at a multiple of 16 bytes


class CudaBackend:
    """cuBLAS, or torch's own kernel for per-row scales on devices for which cuBLAS has none.

    That kernel writes bfloat16 and nothing else. Below compute capability 9.0, where no other backend runs, other
    results are rounded to bfloat16 on the way.
    """

    name = "torch_cuda"

    def unsupported_reason(self, problem: MatmulProblem) -> str | None:
        """None for the pairs of formats and scales that cuBLAS multiplies."""
        return next(_unsupported_reasons(problem), None)

    def scaled_mm(self, a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None, problem: MatmulProblem) -> Tensor:
        """See :class:`octavo.kernels.backend.Backend`."""
        if block_widths(problem):
            return _by_blocks(a, b, bias, problem)
        traced = is_traced(a.data, b.data)
        left, right = _pad_to_16(a.data, rows=False, traced=traced), _pad_to_16(b.data, rows=True, traced=traced)
        extra = right.shape[0] - problem.n
        a_scale, b_scale = a.fp32_scale, b.fp32_scale
        if _is_per_row(problem):
            a_scale = _aligned(rows_of_scales(a).expand(problem.m, 1).contiguous(), traced=traced)
            columns = rows_of_scales(b).expand(problem.n, 1).contiguous().view(-1)
            b_scale = _aligned(_extended(columns, extra), traced=traced)[None, :]
        added_there = bias is not None and _takes_bias(bias, problem)
        product = torch._scaled_mm(
            left,
            right.t(),
            scale_a=a_scale,
            scale_b=b_scale,
            bias=_extended(bias, extra) if bias is not None and added_there else None,
            out_dtype=_gemm_dtype(problem, sums=bias is not None and not added_there),
            use_fast_accum=problem.fast_accumulation or problem.accumulate is Accumulate.HOPPER_FAST,
        )
        if extra:
            product = product[:, : problem.n]
        return _finished(product, None if added_there else bias, problem)


def _by_blocks(a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None, problem: MatmulProblem) -> Tensor:
    multiply = torch.ops.octavo.cublas_block_mm if is_traced(a.data) or is_traced(b.data) else _block_mm
    squares = (problem.a_granularity == _BLOCKS[1], problem.b_granularity == _BLOCKS[1])
    written = _needed_dtype(problem, sums=problem.bias)
    product = multiply(a.data, a.fp32_scale, squares[0], b.data, b.fp32_scale, squares[1], written)
    return _finished(product, bias, problem)


def _block_mm(  # noqa: PLR0917 (an operator's schema)
    a: Tensor, a_scale: Tensor, a_squares: bool, b: Tensor, b_scale: Tensor, b_squares: bool, out_dtype: torch.dtype
) -> Tensor:
    """The product of matrices with block scales, of 128x128 where ``squares`` says so, else of 1x128."""
    traced = is_traced(a, b)
    return torch._scaled_mm(
        _pad_to_16(a, rows=False, traced=traced),
        _pad_to_16(b, rows=False, traced=traced).t(),
        scale_a=_block_scales(a_scale, squares=a_squares, traced=traced),
        scale_b=_block_scales(b_scale, squares=b_squares, traced=traced).t(),
        bias=None,
        out_dtype=out_dtype,
        use_fast_accum=False,
    )


def _block_scales(scale: Tensor, *, squares: bool, traced: bool) -> Tensor:
    """Scales [R, blocks of K], row after row, those of 1x128 column after column."""
    return _aligned(scale.contiguous() if squares else scale.t().contiguous().t(), traced=traced)


def _aligned(x: Tensor, *, traced: bool) -> Tensor:
    """Align a tensor to 16 bytes: copy it if it begins elsewhere; in a traced graph the address is unknown."""
    return x if traced or x.data_ptr() % _MULTIPLE == 0 else x.clone()


def _finished(product: Tensor, bias: Tensor | None, problem: MatmulProblem) -> Tensor:
    if bias is not None:
        product = product.float() + bias.float()
    if product.dtype is not problem.out_dtype:
        product = product.to(problem.out_dtype)
    return product if product.is_contiguous() else product.contiguous()


def _unsupported_reasons(problem: MatmulProblem) -> Iterator[str]:
    if problem.device != "cuda":
        yield f"it runs on CUDA, and the operands are on {problem.device}"
        return  # asking for the capability would start CUDA
    capability = torch.cuda.get_device_capability()
    if capability < (8, 9):
        yield f"FP8 tensor cores need compute capability 8.9, and this device has {capability[0]}.{capability[1]}"
    if block_widths(problem):
        yield from _unsupported_block_reasons(problem, capability)
    if problem.accumulate is not Accumulate.FP32 and capability[0] != 9:
        yield f"only Hopper sums as Hopper does, and this device has compute capability {capability[0]}.{capability[1]}"
    if problem.a_dtype is torch.float8_e5m2 and problem.b_dtype is torch.float8_e5m2:
        yield "cuBLAS does not multiply E5M2 by E5M2"
    if {problem.a_dtype, problem.b_dtype} - {E4M3.torch_dtype, E5M2.torch_dtype}:
        yield "FNUZ formats have no tensor core here"
    if 0 in (problem.m, problem.n, problem.k):
        yield "an empty operand has no product"
    if problem.scale_needs_grad:
        yield "cuBLAS has no gradient for a scale, and one requires it"
    if capability >= (9, 0) and _gemm_dtype(problem, sums=problem.bias) is not _needed_dtype(
        problem, sums=problem.bias
    ):
        yield f"with per-row scales it would round to bfloat16 before {problem.out_dtype} or a bias"


def _unsupported_block_reasons(problem: MatmulProblem, capability: tuple[int, int]) -> Iterator[str]:
    groups = (problem.a_granularity, problem.b_granularity)
    if set(groups) - set(_BLOCKS) or groups[0] == groups[1] == _BLOCKS[1]:
        # those given stand in the problem; a traced graph that writes a size serves no other size
        yield "cuBLAS takes 1x128 by 1x128, 1x128 by 128x128 and 128x128 by 1x128, not other block scales"
        return
    if capability[0] != 9 or _CUDA < _VECTORS_SINCE:
        yield "cuBLAS has block scales on compute capability 9.0 alone, since CUDA 12.9"
    if problem.accumulate is not Accumulate.FP32:
        yield "in which order cuBLAS scales and adds the sums of blocks is not documented"
    multiple = _SQUARES_OF_K if _BLOCKS[1] in groups else 128
    if problem.m % 4 or problem.n % _MULTIPLE or problem.k % multiple:
        # M, N and K as given stand in the problem too
        yield f"with these block scales M must be a multiple of 4, N of {_MULTIPLE} and K of {multiple}"


def _is_per_row(problem: MatmulProblem) -> bool:
    return isinstance(problem.a_granularity, PerRow) or isinstance(problem.b_granularity, PerRow)


def _needed_dtype(problem: MatmulProblem, *, sums: bool) -> torch.dtype:
    """Dtype that the GEMM has to write, so that y is rounded once."""
    return torch.float32 if sums else problem.out_dtype


def _gemm_dtype(problem: MatmulProblem, *, sums: bool) -> torch.dtype:
    """Dtype that the GEMM writes."""
    if not _is_per_row(problem) or (_CUDA >= _VECTORS_SINCE and torch.cuda.get_device_capability()[0] == 9):
        return _needed_dtype(problem, sums=sums)
    return torch.bfloat16


def _takes_bias(bias: Tensor, problem: MatmulProblem) -> bool:
    """Return whether cuBLAS adds the bias; it has no gradient."""
    if problem.bias_needs_grad or bias.dtype is torch.float32:
        return False
    return bias.dtype is problem.out_dtype is _gemm_dtype(problem, sums=False)


def _pad_to_16(codes: Tensor, *, rows: bool, traced: bool) -> Tensor:
    """Codes [R, K] row after row from an aligned byte, zeros added to K and, if asked, to R, up to multiples of 16."""
    row_padding = -codes.shape[0] % _MULTIPLE if rows else 0
    column_padding = -codes.shape[1] % _MULTIPLE
    if row_padding or column_padding:
        padded = torch.nn.functional.pad(codes.view(torch.uint8), (0, column_padding, 0, row_padding))
        return padded.view(codes.dtype)
    if codes.stride() != (codes.shape[1], 1):
        codes = codes.contiguous().flatten().view(codes.shape)  # a single row's stride, which may be anything, too
    return _aligned(codes, traced=traced)


def _extended(vector: Tensor, extra: int) -> Tensor:
    return torch.nn.functional.pad(vector, (0, extra)) if extra else vector


torch.library.define(
    "octavo::cublas_block_mm",
    "(Tensor a, Tensor a_scale, bool a_squares, Tensor b, Tensor b_scale, bool b_squares, ScalarType out_dtype) "
    "-> Tensor",
)
torch.library.impl("octavo::cublas_block_mm", "CompositeExplicitAutograd")(_block_mm)
torch.library.register_fake("octavo::cublas_block_mm")(product_shape)

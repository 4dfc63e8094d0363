"""Grouped GEMM of experts: rows sorted by expert, each multiplied by its expert's weight.

On a GPU this is one launch, which reads on the device where each expert's rows begin: the host never synchronizes.
Elsewhere, and as the definition, it is one GEMM per expert. In a traced graph it is one operator,
``octavo::grouped_mm``.
"""

from itertools import pairwise

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.backend import MatmulProblem, product_shape
from octavo.kernels.backends.triton import TritonBackend
from octavo.kernels.dispatch import check_operands, scaled_mm
from octavo.kernels.tracing import is_traced
from octavo.numerics import Accumulate, PerBlock, PerTensor, QuantizedTensor
from octavo.numerics.cast import is_eager_cpu
from octavo.numerics.granularity import granularity_as_list, granularity_from_list

__all__ = ["scaled_grouped_mm"]

_TRITON = TritonBackend()


def scaled_grouped_mm(
    a: QuantizedTensor, b: QuantizedTensor, offsets: Tensor, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Multiply each expert's rows by its weight.

        y[t] = (a.data[t] @ b.data[e].T) · a.scale[t] · b.scale[e].T,  offsets[e] ≤ t < offsets[e + 1]

    Sums, scales and the one rounding are those of :func:`octavo.scaled_mm`. The gradient of a is the same product, of
    y's gradient with every expert's transposed weight. No gradient passes through.

    Args:
        a: [T, K], its rows sorted by expert; one scale for all, one a row, or one for each so many of a row.
        b: [E, N, K]; ``PerBlock(N, K)`` is one scale an expert.
        offsets: [E + 1], int32 or int64, rising from 0 to T; an expert may have no rows. Its values are checked on a
            CPU. On a GPU they are not: rows that belong to no expert are undefined.
        out_dtype: bfloat16, float16 or float32; None is ``a.hp_dtype``.

    Returns:
        [T, N] of ``out_dtype``.

    Raises:
        ConfigError: operands of other shapes, rows of a that share scales, invalid offsets, a wrong out_dtype.

    Example:
        >>> import octavo
        >>> x, w = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[[1.0]], [[0.5]]])
        >>> one = torch.tensor(1.0)
        >>> a, b = (octavo.quantize(t, octavo.E4M3, scale=one) for t in (x, w))
        >>> scaled_grouped_mm(a, b, torch.tensor([0, 1, 3]))
        tensor([[1.],
                [1.],
                [2.]])
    """
    out_dtype = check_operands(a, b, out_dtype)
    _check(a, b, offsets)
    if not (is_traced(a.data) or is_traced(b.data)):
        return _grouped(a, b, offsets, out_dtype)
    result: Tensor = torch.ops.octavo.grouped_mm(
        *(a.data, a.scale, granularity_as_list(a.granularity)),
        *(b.data, b.scale, granularity_as_list(b.granularity)),
        *(offsets, out_dtype),
    )
    return result


def _check(a: QuantizedTensor, b: QuantizedTensor, offsets: Tensor) -> None:
    if a.data.ndim != 2 or b.data.ndim != 3 or a.shape[1] != b.shape[2]:
        raise ConfigError(
            f"scaled_grouped_mm multiplies a [T, K] and b [E, N, K], not {tuple(a.shape)} and {tuple(b.shape)}"
        )
    if isinstance(a.granularity, PerBlock) and a.granularity.rows != 1:
        raise ConfigError(f"rows of different experts share no scale; quantize a per row, not {a.granularity}")
    if offsets.dtype not in (torch.int32, torch.int64) or offsets.shape != (b.shape[0] + 1,):
        raise ConfigError(
            f"offsets must be int32 or int64 of shape ({b.shape[0] + 1},), not {offsets.dtype} {tuple(offsets.shape)}"
        )
    for name, device in (("b", b.data.device), ("offsets", offsets.device)):
        if device != a.data.device:
            raise ConfigError(f"{name} is on {device} and a on {a.data.device}; move it there first")
    if is_eager_cpu(offsets) and not is_traced(offsets):
        bounds = offsets.tolist()
        if bounds[0] != 0 or bounds[-1] != a.shape[0] or bounds != sorted(bounds):
            raise ConfigError(f"offsets must rise from 0 to the {a.shape[0]} rows of a, not be {bounds}")


def _grouped(a: QuantizedTensor, b: QuantizedTensor, offsets: Tensor, out_dtype: torch.dtype) -> Tensor:
    problem = MatmulProblem(
        m=a.shape[0],
        n=b.shape[1],
        k=a.shape[1],
        device=a.data.device.type,
        a_dtype=a.data.dtype,
        b_dtype=b.data.dtype,
        a_granularity=a.granularity,
        b_granularity=b.granularity,
        out_dtype=out_dtype,
        bias=False,
        accumulate=Accumulate.FP32,
        scale_needs_grad=torch.is_grad_enabled() and (a.scale.requires_grad or b.scale.requires_grad),
    )
    if b.shape[0] and _TRITON.unsupported_reason(problem) is None:
        from octavo.kernels.triton import grouped_gemm

        return grouped_gemm.grouped_product(a, b, offsets, out_dtype)
    return _multiply_each_expert(a, b, offsets, out_dtype)


def _multiply_each_expert(a: QuantizedTensor, b: QuantizedTensor, offsets: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Definition of the grouped GEMM: one GEMM for each expert that has rows."""
    out = a.data.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
    for expert, (start, end) in enumerate(pairwise(offsets.tolist())):
        if start < end:
            rows = _part(a, slice(start, end))
            out[start:end] = scaled_mm(rows, _part(b, expert), out_dtype=out_dtype)
    return out


def _part(q: QuantizedTensor, part: slice | int) -> QuantizedTensor:
    """Rows of a matrix, or a matrix of a stack."""
    scale = q.scale if isinstance(q.granularity, PerTensor) else q.scale[part]
    return QuantizedTensor(q.data[part], scale, q.granularity, q.hp_dtype)


def _grouped_mm(  # noqa: PLR0917 (an operator's schema)
    a: Tensor,
    a_scale: Tensor,
    a_granularity: list[int],
    b: Tensor,
    b_scale: Tensor,
    b_granularity: list[int],
    offsets: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    a_operand = QuantizedTensor(a, a_scale, granularity_from_list(a_granularity), out_dtype)
    b_operand = QuantizedTensor(b, b_scale, granularity_from_list(b_granularity), out_dtype)
    return _grouped(a_operand, b_operand, offsets, out_dtype)


torch.library.define(
    "octavo::grouped_mm",
    "(Tensor a, Tensor a_scale, int[] a_granularity, Tensor b, Tensor b_scale, int[] b_granularity, Tensor offsets, "
    "ScalarType out_dtype) -> Tensor",
)
torch.library.impl("octavo::grouped_mm", "CompositeExplicitAutograd")(_grouped_mm)
torch.library.register_fake("octavo::grouped_mm")(product_shape)

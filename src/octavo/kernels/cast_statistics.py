"""Statistics of a cast, summed by the native kernel in one pass over the tensor and one over some of its rows.

The sums are those of :mod:`octavo.doctor.statistics`, which defines them by torch's operations.
"""

import torch
from torch import Tensor

import octavo.kernels.native_bindings as native_bindings
from octavo.errors import BackendError
from octavo.formats import Format
from octavo.kernels.tracing import is_traced
from octavo.numerics import QuantizedTensor
from octavo.numerics.scaling import AMAX_FLOOR, smallest_scaled_amax

__all__ = ["cast_sums", "least_judged_amax", "least_stale_ratio", "sums"]

CLEAR_OF_FLOOR = 10  # a tenth of an amax is not what its scale was computed for, however roughly the amax was measured


def least_judged_amax(form: Format, amax_floor: float) -> float:
    """Bound above which an amax sets its own scale; at or below it the floor decides.

    Example:
        >>> from octavo.formats import E4M3
        >>> f"{least_judged_amax(E4M3, 0.0):.3g}", least_judged_amax(E4M3, 0.5)
        ('1.32e-35', 5.0)
    """
    return CLEAR_OF_FLOOR * smallest_scaled_amax(form, amax_floor)


def least_stale_ratio(amaxes: Tensor, scale: Tensor, form: Format, *, amax_floor: float) -> Tensor:
    """The smallest g of scaling groups whose amax is clear of the floor: [], infinite where none is."""
    return (amaxes / (scale * form.max)).where(amaxes > least_judged_amax(form, amax_floor), torch.inf).amin()


def sums(x: Tensor, quantized: QuantizedTensor) -> bool:
    """Return whether :func:`cast_sums` supports this cast."""
    return native_bindings.supports(x, quantized.format, quantized.granularity) and not is_traced(x)


def cast_sums(
    x: Tensor, quantized: QuantizedTensor, rows: slice, *, amax_floor: float = AMAX_FLOOR, level: str | None = None
) -> Tensor:
    """``octavo.doctor.statistics.CAST_SUMS`` as float64, in FP64 sums.

    Args:
        x: [M, K], as :func:`sums` allows; fastest where its rows, or its columns, lie side by side.
        quantized: its codes and scales.
        rows: the rows that are summed, columns of a transposed view: where they start and how far apart they are.
        amax_floor: the floor that the scales were computed with.
        level: an instruction-set level; None is the best.

    Raises:
        BackendError: tensors that do not go together.
    """
    native_bindings.check_input(x, quantized.format, quantized.granularity, (*native_bindings.DTYPES, torch.float64))
    if x.ndim != 2 or x.shape != quantized.shape:
        raise BackendError(f"a matrix and its codes have one shape, not {tuple(x.shape)} and {tuple(quantized.shape)}")
    matrix, transposed = native_bindings.as_matrix(x, quantized.granularity)
    codes = quantized.data.t() if transposed else quantized.data
    codes, _ = native_bindings.as_matrix(codes, quantized.granularity, may_transpose=False)
    first, _, step = rows.indices(matrix.shape[0])
    if first >= matrix.shape[0] or step < 1:
        raise BackendError(f"there are no rows {rows} among {matrix.shape[0]}")
    height, width = native_bindings.block_of(quantized.granularity, *matrix.shape, transposed=transposed)
    groups = (-(-matrix.shape[0] // height), -(-matrix.shape[1] // width))
    scale = native_bindings.as_groups(quantized.fp32_scale, groups, transposed=transposed)
    measured = native_bindings.fresh(groups, torch.float32)
    out = native_bindings.fresh((native_bindings.extension().CAST_SUMS,), torch.float64)
    native_bindings.extension().cast_sums(
        native_bindings.level_number(level),
        *(matrix.data_ptr(), native_bindings.DTYPES.index(matrix.dtype), *matrix.shape, matrix.stride(0)),
        *(native_bindings.CODES.index(codes.dtype), height, width, scale.data_ptr()),
        *(codes.data_ptr(), codes.stride(0), first, step),
        measured.data_ptr(),
        out.data_ptr(),
    )
    least = least_stale_ratio(measured, scale, quantized.format, amax_floor=amax_floor)
    return torch.cat([out, least.double().reshape(1)])

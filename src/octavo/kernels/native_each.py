"""Bindings of the native casts of several matrices in one call."""

from collections.abc import Sequence

import torch
from torch import Tensor

import octavo.kernels.native_bindings as bindings
from octavo.errors import BackendError
from octavo.numerics import CastSpec, Nonfinite, QuantizedTensor, ScaleRounding
from octavo.numerics.cast_spec import LARGEST_MARGIN
from octavo.numerics.quantized import stored_scale

__all__ = ["cast_each"]

_ROUNDINGS = tuple(ScaleRounding)


def cast_each(
    matrices: Sequence[Tensor],
    spec: CastSpec,
    *,
    transposed: bool,
    amax: Tensor | None,
    scale: Tensor | None,
    measure_if_zero: bool,
) -> tuple[list[QuantizedTensor], tuple[Tensor, ...], list[int]]:
    """Cast several matrices as :func:`octavo.kernels.native_bindings.cast` does each.

    Args:
        matrices: of one dtype, width and row stride, their columns side by side.
        spec: how to cast.
        transposed: cast the transpose of each instead; its codes are a view.
        amax: float32 [G], one for each; as is ``scale``.
        scale: see ``amax``.
        measure_if_zero: as there.

    Returns:
        The codes with their scales, the measured amaxes of each, and its count of non-finite elements.
    """
    granularity, hp_dtype = spec.granularity, matrices[0].dtype
    for matrix in matrices:
        bindings.check_input(matrix, spec.format, granularity, (*bindings.DTYPES, torch.float64))
    matrices = [bindings.in_memory(x.float() if x.dtype is torch.float64 else x) for x in matrices]
    columns, stride, rows = matrices[0].shape[1], matrices[0].stride(0), [len(x) for x in matrices]
    if any((x.dtype, x.shape[1], x.stride(0)) != (matrices[0].dtype, columns, stride) for x in matrices if len(x) > 1):
        raise BackendError("matrices that are cast in one call have one dtype, width and row stride")
    blocks = [bindings.block_of(granularity, each, columns, transposed=transposed) for each in rows]
    down = [-(-each // block_rows) for each, (block_rows, _) in zip(rows, blocks, strict=True)]
    block_columns = blocks[0][1]
    codes = bindings.fresh((sum(rows), columns), spec.format.torch_dtype)
    measured = bindings.fresh((sum(down), -(-columns // block_columns)), torch.float32)
    given = [
        None if each is None else bindings.as_groups(each, (len(rows),), transposed=False) for each in (amax, scale)
    ]
    scales = bindings.fresh(measured.shape, torch.float32) if given[1] is None else given[1].view(-1, 1)
    nonfinite = bindings.extension().quantize_each(
        -1,
        *([x.data_ptr() for x in matrices], rows, bindings.DTYPES.index(matrices[0].dtype), columns, stride),
        *(bindings.CODES.index(spec.format.torch_dtype), max(block[0] for block in blocks), block_columns),
        *(spec.nonfinite == Nonfinite.PROPAGATE, _ROUNDINGS.index(spec.scale_rounding)),
        *(spec.amax_floor, int(min(spec.margin, LARGEST_MARGIN))),
        *(bindings.address(given[0]), measure_if_zero, bindings.address(given[1])),
        *(codes.data_ptr(), scales.data_ptr(), measured.data_ptr()),
    )
    stored = stored_scale(scales, spec.scale_format)
    operands = []
    for memory, scale_memory in zip(codes.split(rows), stored.split(down), strict=True):
        data, its_scale = (memory.t(), scale_memory.t()) if transposed else (memory, scale_memory)
        shaped = its_scale.reshape(granularity.scale_shape(data.shape))
        operands.append(QuantizedTensor(data, shaped, granularity, hp_dtype))
    return operands, measured.split(down), nonfinite

"""Calls of the Triton kernels that cast: supported problems, and tensors of any shape.

Codes and scales are those of :mod:`octavo.numerics`, bit for bit, except for the sign of a NaN code (see
:mod:`octavo.kernels.triton.codes`). Codes always come out contiguous in the order of
the tensor that was asked for, whatever the order in memory of what is cast: Hopper's FP8 GEMM reads both operands along
K. Nothing here waits for the device. Triton is imported by the first call that needs it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from octavo.formats import E4M3, E5M2, Format
from octavo.kernels.backend import CastProblem, CastResult
from octavo.kernels.native_bindings import DTYPES, is_transposed
from octavo.kernels.tracing import is_traced
from octavo.kernels.triton.launching import WHY_ABSENT, allocate, on_device_of
from octavo.numerics import (
    AmaxRecord,
    CastSpec,
    Granularity,
    Measurement,
    PerBlock,
    PerRow,
    PerTensor,
    QuantizedTensor,
    Rounding,
)
from octavo.numerics.granularity import stacks
from octavo.numerics.quantized import stored_scale
from octavo.numerics.random_bits import random_bits_by_torch

if TYPE_CHECKING:
    from octavo.kernels.triton.casts import OrientedCast

__all__ = [
    "cast",
    "close_step",
    "closes_steps",
    "dequantize",
    "fake_quantize",
    "fakes",
    "random_bits",
    "round_stochastic",
    "supports",
    "unsupported_reason",
    "why_absent",
]

_FORMATS = {fmt.torch_dtype: fmt for fmt in (E4M3, E5M2)}
_LARGEST_BLOCK = 128  # rows or columns that fit into a kernel's tile
_LONGEST_ROW = 16384  # elements that stay in registers
_LONGEST_WINDOW = 4096  # for three roles


def why_absent() -> str | None:
    """Why no Triton kernel runs here, or None."""
    if WHY_ABSENT is not None:
        return WHY_ABSENT
    return None if torch.cuda.is_available() else "there is no CUDA device"


def unsupported_reason(problem: CastProblem) -> str | None:
    """Why :func:`cast` cannot run, as a clause; None when it can."""
    return next(_unsupported_reasons(problem), None)


def _unsupported_reasons(problem: CastProblem) -> Iterator[str]:
    if problem.device != "cuda":
        yield f"it runs on CUDA, and the tensor is on {problem.device}"
    if WHY_ABSENT is not None:
        yield WHY_ABSENT
    if problem.format not in (E4M3, E5M2):
        yield f"its codes are E4M3 and E5M2, not {problem.format}"
    if problem.dtype not in DTYPES:
        verb = "decodes to" if problem.decodes else "casts"
        yield f"it {verb} float32, bfloat16 and float16, not {problem.dtype}"
    if problem.rounding != Rounding.NEAREST:
        yield "it rounds to nearest"
    if problem.foreign:
        yield "it makes octavo's scales, not another engine's"
    if 0 in problem.shape:
        yield "the tensor is empty"
    if problem.transformed:
        yield "it reads memory, which torch.func's tensors do not have"
    yield from _unsupported_group_reasons(problem)


def _unsupported_group_reasons(problem: CastProblem) -> Iterator[str]:
    if problem.scale_given and not isinstance(problem.granularity, PerTensor):
        yield "an amax or a scale can be passed for the whole tensor only"
    if not _fits(problem.granularity):
        yield f"its blocks are powers of two up to {_LARGEST_BLOCK}, not {problem.granularity}"
    if not stacks(problem.granularity, problem.shape):
        yield f"a block of {problem.granularity} would hold rows of two matrices"


def supports(x: Tensor, fmt: Format, granularity: Granularity) -> bool:
    """Return whether :func:`cast` can cast ``x`` with scales of its own."""
    return unsupported_reason(CastProblem.of(x, fmt, granularity)) is None


def _fits(granularity: Granularity) -> bool:
    if not isinstance(granularity, PerBlock):
        return isinstance(granularity, PerTensor | PerRow)
    sizes = (granularity.rows, granularity.columns)
    return all(size <= _LARGEST_BLOCK and size & (size - 1) == 0 for size in sizes)


def cast(
    x: Tensor,
    spec: CastSpec,
    *,
    amax: Tensor | None = None,
    scale: Tensor | None = None,
    measure_if_zero: bool = False,
    transpose: bool = False,
    counting: bool = False,
    record: AmaxRecord | None = None,
) -> CastResult:
    """Measure and cast.

    Args:
        x: as :func:`unsupported_reason` allows.
        spec: how to cast.
        amax: float32 [], from which the scale is computed; None measures ``x``.
        scale: float32 [], used as it is.
        measure_if_zero: whether a given amax of 0 means the measured one.
        transpose: cast the transpose of the matrix ``x`` too, from the same reading where groups allow.
        counting: count saturated and underflowed elements, with one scale a tensor.
        record: where to record what is measured, instead of new memory, which takes a launch to clear; the kernels that
            cast record themselves, and the result has no measurement.
    """
    granularity = spec.granularity
    fresh = record is None and isinstance(granularity, PerTensor) and amax is scale is None
    measured = _empty_record(x, granularity, fresh=fresh) if record is None else record
    matrix, is_t = _as_matrix(x.detach() if x.requires_grad else x, granularity)
    with on_device_of(x):
        direct, transposed, clipped = _kernels(
            matrix, spec, amax=amax, scale=scale, measure_if_zero=measure_if_zero,
            direct=transpose or not is_t, transposed=transpose or is_t, counting=counting, record=measured, fresh=fresh,
        )  # fmt: skip
    lines, transposed_lines = (transposed, direct) if is_t else (direct, transposed)
    assert lines is not None
    shape = granularity.scale_shape(x.shape)
    if lines.amax is not None and measured.amax is not None:  # kernels raise one amax for a tensor, none for its groups
        measured.amax.copy_(torch.maximum(measured.amax, lines.amax.amax()))
    amax = measured.amax if lines.amax is None else lines.amax
    return CastResult(
        QuantizedTensor(
            lines.codes if lines.codes.shape == x.shape else lines.codes.view(x.shape),
            stored_scale(lines.scale if lines.scale.shape == shape else lines.scale.view(shape), spec.scale_format),
            granularity,
            x.dtype,
        ),
        _operand(transposed_lines, spec, x.dtype) if transpose and transposed_lines is not None else None,
        Measurement(amax.view(shape), measured.nonfinite) if record is None and amax is not None else None,
        *(() if clipped is None else clipped.unbind()),
    )


def _operand(lines: "OrientedCast", spec: CastSpec, hp_dtype: torch.dtype) -> QuantizedTensor:
    return QuantizedTensor(lines.codes, stored_scale(lines.scale, spec.scale_format), spec.granularity, hp_dtype)


def _empty_record(x: Tensor, granularity: Granularity, *, fresh: bool) -> AmaxRecord:
    """A zeroed record, or uninitialized memory for one; two tensors, since an operator's results share no memory."""
    make = allocate if fresh else _zeros
    amax = make(x, (), torch.float32) if isinstance(granularity, PerTensor) else None
    return AmaxRecord(amax, None, make(x, (), torch.int64))


def _zeros(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return like.new_zeros(shape, dtype=dtype)


def fakes(x: Tensor, granularity: Granularity) -> bool:
    """Return whether :func:`fake_quantize` supports these groups: no columns, and rows of at most 16384 elements."""
    if isinstance(granularity, PerTensor):
        return True
    return not is_transposed(x) and not (isinstance(granularity, PerRow) and x.shape[-1] > _LONGEST_ROW)


def fake_quantize(x: Tensor, spec: CastSpec, *, out: Tensor | None = None) -> Tensor:
    """Values of :func:`cast`'s codes, without the codes.

    Args:
        x: as :func:`supports` and :func:`fakes` allow.
        spec: how to cast.
        out: where to write: shaped like ``x``, in its dtype, or ``x`` itself; None makes a new tensor.
    """
    matrix, transposed = _as_matrix(x.detach(), spec.granularity)
    in_place = out is not None and out.stride() == x.stride() and matrix.data_ptr() == x.data_ptr() == out.data_ptr()
    values = matrix if in_place else torch.empty(matrix.shape, dtype=x.dtype, device=x.device)
    with on_device_of(x):
        _kernels(matrix, spec, values=values)
    if in_place and out is not None:
        return out
    result = (values.t() if transposed else values).reshape(x.shape)
    return result if out is None else out.copy_(result)


def dequantize(codes: Tensor, scale: Tensor, granularity: Granularity, out_dtype: torch.dtype) -> Tensor:
    """``fp32(codes) · scale``, rounded once to ``out_dtype``.

    Args:
        codes: as :func:`unsupported_reason` allows.
        scale: float32, in the granularity's shape.
        granularity: the scaling groups.
        out_dtype: float32, bfloat16 or float16.
    """
    from octavo.kernels.triton import values

    matrix, transposed = _as_matrix(codes, PerRow())  # one long row would leave most of a tile empty
    shape = granularity.scale_shape(codes.shape)
    scales = scale.reshape(1, 1) if isinstance(granularity, PerTensor) else scale.reshape(-1, shape[-1])
    block = (0, 0) if isinstance(granularity, PerTensor) else (1, 0)
    if isinstance(granularity, PerBlock):
        block = (granularity.rows, granularity.columns)
    if transposed:
        scales, block = scales.t(), block[::-1]
    with on_device_of(codes):
        decoded = values.dequantize(matrix, scales, block, _FORMATS[codes.dtype], out_dtype)
    return (decoded.t() if transposed else decoded).reshape(codes.shape)


def round_stochastic(scaled: Tensor, random: Tensor, fmt: Format) -> Tensor:
    """Codes of numbers, rounded up in magnitude where the dropped fraction and a random one together make 1.

    Args:
        scaled: float32, not empty, finite ones within ±maximum.
        random: integers from 0 to 2²⁰ - 1, shaped like ``scaled``.
        fmt: E4M3 or E5M2.
    """
    from octavo.kernels.triton import values

    with on_device_of(scaled):
        return values.round_stochastic(scaled.contiguous(), random.to(torch.int32).contiguous(), fmt)


def random_bits(seed: Tensor, count: int) -> Tensor:
    """int32 [count]: bits that :mod:`octavo.numerics.random_bits` defines for ``seed``, an int64 [] on the device."""
    if WHY_ABSENT is not None or not count:
        return random_bits_by_torch(seed, count)
    from octavo.kernels.triton import values

    with on_device_of(seed):
        return values.random_bits(seed, count)


def closes_steps(window: Tensor) -> bool:
    """Return whether :func:`close_step` can close the step of a window of amaxes."""
    plain = window.is_cuda and WHY_ABSENT is None and window.shape[1] <= _LONGEST_WINDOW
    return plain and not is_traced(window)


def close_step(*state: Tensor, **options: Any) -> None:
    """See :func:`octavo.kernels.triton.history.close_step`."""
    from octavo.kernels.triton import history

    history.close_step(*state, **options)


def _kernels(
    matrix: Tensor,
    spec: CastSpec,
    *,
    amax: Tensor | None = None,
    scale: Tensor | None = None,
    measure_if_zero: bool = False,
    direct: bool = True,
    transposed: bool = False,
    counting: bool = False,
    values: Tensor | None = None,
    record: AmaxRecord | None = None,
    fresh: bool = False,
) -> "tuple[OrientedCast | None, OrientedCast | None, Tensor | None]":
    """The matrix, its transpose, and the numbers of saturated and underflowed elements, int64 [2] if counted."""
    if isinstance(spec.granularity, PerTensor):
        from octavo.kernels.triton.casts import cast_tensor

        return cast_tensor(
            matrix, spec, amax=amax, scale=scale, measure_if_zero=measure_if_zero,
            direct=direct, transposed=transposed, counting=counting, values=values, record=record, fresh=fresh,
        )  # fmt: skip
    from octavo.kernels.triton.blocks import cast_blocks
    from octavo.kernels.triton.rows import cast_rows

    cast_groups = cast_blocks if isinstance(spec.granularity, PerBlock) else cast_rows
    return *cast_groups(matrix, spec, direct=direct, transposed=transposed, values=values, record=record), None


def _as_matrix(x: Tensor, granularity: Granularity) -> tuple[Tensor, bool]:
    """``x`` as a matrix whose columns lie side by side, and whether it is the transpose of ``x``."""
    if is_transposed(x):
        return x.t(), True
    if x.ndim != 2:
        x = x.reshape(1, -1) if isinstance(granularity, PerTensor) or x.ndim < 2 else x.reshape(-1, x.shape[-1])
    return (x if x.shape[1] == 1 or x.stride(1) == 1 else x.contiguous()), False

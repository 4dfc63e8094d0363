"""Several casts, or several GEMMs, as one call: what the experts of a layer need at once.

Each has the numbers of :func:`octavo.kernels.cast` and :func:`octavo.kernels.scaled_mm`, which are the definition and
run one by one where no backend takes them together. The native CPU kernels do: a call for each of 64 small experts
costs several times the work in it. On a GPU it is the launch that costs: Triton's kernel multiplies all in one, also
where cuBLAS would multiply each; others cast all that have a scale each; and matrices that are rows of one tensor are
cast as that tensor, if no scale is of rows of two.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Unpack

import torch
from torch import Tensor

import octavo.kernels.native_each as native_each
import octavo.kernels.native_gemm as native_gemm
from octavo.kernels.backend import ScaleSource, block_widths
from octavo.kernels.dispatch import backend_of_cast, cast, scaled_mm, select_product
from octavo.kernels.row_by_row import is_row_by_row
from octavo.kernels.tracing import is_traced
from octavo.numerics import Accumulate, AmaxRecord, CastSpec, Granularity, PerBlock, PerRow, PerTensor, QuantizedTensor
from octavo.numerics.quantized import rows_of_scales, stored_scale

__all__ = ["EachRecord", "cast_each", "scaled_mm_each"]


@dataclass(frozen=True, slots=True)
class EachRecord:
    """Buffers that accumulate measurements of several matrices in place; a None accumulates nothing.

    Attributes:
        at: where each matrix's numbers are; None where there are no buffers.
        amax: float32 [E], raised to the amax; below 0 where nothing was measured.
        overflowed: bool [E], set by NaN or ±Inf.
        nonfinite: int64 [], raised by the number of NaN and ±Inf elements of all.
    """

    at: tuple[int, ...] | None = None
    amax: Tensor | None = None
    overflowed: Tensor | None = None
    nonfinite: Tensor | None = None

    def of(self, matrix: int) -> AmaxRecord:
        """The buffers of one matrix."""
        if self.at is None:
            return AmaxRecord()
        at = self.at[matrix]
        amax, overflowed = (None if each is None else each[at] for each in (self.amax, self.overflowed))
        return AmaxRecord(amax, overflowed, self.nonfinite)

    def add(self, amaxes: Tensor, nonfinite: Tensor) -> None:
        """Accumulate the largest magnitude and the count of non-finite elements of each matrix, on their device."""
        pinned = torch.tensor(self.at or (), dtype=torch.int64, device="cpu", pin_memory=amaxes.is_cuda)
        at = pinned.to(amaxes.device, non_blocking=True)
        if self.amax is not None:
            self.amax[at] = torch.maximum(self.amax[at], amaxes)
        if amaxes.is_cpu and not nonfinite.any():
            return
        if self.overflowed is not None:
            self.overflowed[at] |= nonfinite > 0
        if self.nonfinite is not None:
            self.nonfinite.add_(nonfinite.sum())


_NOTHING = EachRecord()


def cast_each(
    matrices: Sequence[Tensor],
    spec: CastSpec,
    *,
    transposed: bool = False,
    amax: Tensor | None = None,
    scale: Tensor | None = None,
    measure_if_zero: bool = False,
    record: EachRecord = _NOTHING,
) -> tuple[list[QuantizedTensor], Tensor | None]:
    """Cast several matrices, or their transposes; none is empty.

    Args:
        matrices: of one dtype, width and row stride, their columns side by side.
        spec: how to cast.
        transposed: cast the transpose of each instead.
        amax: float32 [G], to compute the scale of each from, for one scale a matrix; None measures.
        scale: float32 [G], the scale of each.
        measure_if_zero: use the measured amax where the passed one is 0.
        record: buffers for what is measured.

    Returns:
        Their codes and scales; and for one scale a matrix their amaxes, float32 [G], where one call measured them all.
    """
    sources = [_source(number, amax, scale, measure_if_zero=measure_if_zero) for number in range(len(matrices))]
    backend = backend_of_cast(matrices[0], spec, sources[0])
    if backend == "native" and not is_traced(matrices[0]):
        operands, amaxes, nonfinite = native_each.cast_each(
            matrices, spec, transposed=transposed, amax=amax, scale=scale, measure_if_zero=measure_if_zero
        )
        whole = isinstance(spec.granularity, PerTensor)
        largest = torch.cat(amaxes).flatten() if whole else None
        if record.at is not None:
            counts = torch.tensor(nonfinite, dtype=torch.int64, device="cpu")
            record.add(torch.stack([each.amax() for each in amaxes]) if largest is None else largest, counts)
        return operands, largest
    together = backend == "triton" and not is_traced(matrices[0]) and not _is_captured(matrices[0])
    if together and isinstance(spec.granularity, PerTensor):
        return _cast_with_a_scale_each(
            matrices, spec, record, transposed=transposed, amax=amax, scale=scale, measure_if_zero=measure_if_zero
        )
    measured = record.amax is not None or record.overflowed is not None  # of each, and a cast of all finds one
    height = _rows_of_a_group(spec.granularity, transposed=transposed) if together and not measured else None
    operands = []
    for run in _runs(matrices, height):
        matrix = run[0] if len(run) == 1 else _whole(run)
        number = len(operands)
        result = cast(matrix.t() if transposed else matrix, spec, record=record.of(number), **sources[number]).output
        operands += [result] if height is None else _parts(result, [len(x) for x in run], height, transposed=transposed)
    return operands, None


def _cast_with_a_scale_each(
    matrices: Sequence[Tensor], spec: CastSpec, record: EachRecord, *, transposed: bool, **source: Unpack[ScaleSource]
) -> tuple[list[QuantizedTensor], Tensor | None]:
    from octavo.kernels.triton import casts_each

    buffers = (record.amax, record.overflowed, record.nonfinite)
    measure = record.at is not None and any(buffer is not None for buffer in buffers)
    result = casts_each.cast_matrices(matrices, spec, measure=measure, **source)
    if measure and result.amaxes is not None and result.nonfinite is not None:
        record.add(result.amaxes, result.nonfinite)
    scales = stored_scale(result.scales, spec.scale_format)
    operands = [
        QuantizedTensor(codes.t() if transposed else codes, scale, spec.granularity, matrices[0].dtype)
        for codes, scale in zip(result.codes.split([len(x) for x in matrices]), scales.unbind(), strict=True)
    ]
    return operands, result.amaxes


def _rows_of_a_group(granularity: Granularity, *, transposed: bool) -> int | None:
    """Number of rows of a matrix that share scales, if it or its transpose is cast; None if all do."""
    if isinstance(granularity, PerBlock):
        return granularity.columns if transposed else granularity.rows
    return 1 if isinstance(granularity, PerRow) and not transposed else None


def _runs(matrices: Sequence[Tensor], height: int | None) -> list[list[Tensor]]:
    """Runs of matrices that follow each other in memory, each but the last of whole groups; one each without groups."""
    runs: list[list[Tensor]] = []
    for matrix in matrices:
        before = runs[-1][-1] if runs else None
        if before is not None and height is not None and len(before) % height == 0 and _follows(before, matrix):
            runs[-1].append(matrix)
        else:
            runs.append([matrix])
    return runs


def _follows(before: Tensor, matrix: Tensor) -> bool:
    end = before.data_ptr() + before.shape[0] * before.stride(0) * before.itemsize
    same_memory = matrix.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
    return same_memory and matrix.data_ptr() == end and matrix.stride() == before.stride()


def _whole(run: list[Tensor]) -> Tensor:
    return run[0].as_strided((sum(len(matrix) for matrix in run), run[0].shape[1]), run[0].stride())


def _parts(whole: QuantizedTensor, rows: list[int], height: int, *, transposed: bool) -> list[QuantizedTensor]:
    """Matrices of so many rows, or their transposes, each of whole groups of ``height`` rows but the last."""
    data = whole.data.split(rows, dim=int(transposed))
    scales = whole.scale.split([-(-each // height) for each in rows], dim=int(transposed))
    return [replace(whole, data=codes, scale=scale) for codes, scale in zip(data, scales, strict=True)]


def _source(number: int, amax: Tensor | None, scale: Tensor | None, *, measure_if_zero: bool) -> ScaleSource:
    return {
        "amax": None if amax is None else amax[number],
        "scale": None if scale is None else scale[number],
        "measure_if_zero": measure_if_zero,
    }


def scaled_mm_each(
    a: Sequence[QuantizedTensor],
    b: Sequence[QuantizedTensor],
    outs: Sequence[Tensor],
    *,
    biases: Sequence[Tensor] | None = None,
    accumulate: Accumulate = Accumulate.FP32,
    fast_accumulation: bool = False,
) -> None:
    """Write ``a[i] @ b[i].T + biases[i]`` into ``outs[i]``, contiguous; arguments as in :func:`octavo.scaled_mm`.

    All of ``a`` have one dtype and granularity, all of ``b``, and all of ``outs`` and ``biases`` one dtype.
    """
    out_dtype = outs[0].dtype
    one_by_one = is_traced(a[0].data) or _is_captured(a[0].data) or (is_row_by_row() and accumulate == Accumulate.FP32)
    if not one_by_one:
        longest = max(range(len(a)), key=lambda number: a[number].shape[1])  # it decides for all
        backend, problem = select_product(
            *(a[longest], b[longest], out_dtype, None if biases is None else biases[longest], accumulate),
            fast_accumulation=fast_accumulation,
            preferred="triton" if a[0].data.is_cuda else None,
        )
        if backend == "native":
            native_gemm.gemm_each(
                [(left.data, rows_of_scales(left)) for left in a],
                [(right.data, rows_of_scales(right)) for right in b],
                outs,
                biases=biases,
                block=max(block_widths(problem), default=0),
            )
            return
        if backend == "triton":
            from octavo.kernels.triton import gemm_each

            gemm_each.product_each(a, b, outs, biases)
            return
    for number, (left, right, out) in enumerate(zip(a, b, outs, strict=True)):
        out.copy_(
            scaled_mm(
                left,
                right,
                out_dtype=out_dtype,
                bias=None if biases is None else biases[number],
                accumulate=accumulate,
                fast_accumulation=fast_accumulation,
            )
        )


def _is_captured(x: Tensor) -> bool:
    """Whether a CUDA graph records; it would replay the copy of a table from host memory that is not its own then."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()

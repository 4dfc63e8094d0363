"""Operators of the casts in a traced graph: one operator a cast, since a compiler would write a slower loop of its own.

``octavo::cast`` and ``octavo::cast_both_ways`` carry a :class:`octavo.numerics.CastSpec` as plain arguments. On a GPU
``torch.compile`` sees the operators' kernels, and what it makes of the graph launches them by itself.
"""

from typing import Any, Unpack

import torch
from torch import Tensor

import octavo.kernels.native_bindings as native_bindings
import octavo.kernels.triton_bindings as triton_bindings
from octavo.formats import format_of
from octavo.kernels.backend import CastResult, ScaleSource
from octavo.kernels.tracing import inline_kernels, sources
from octavo.kernels.triton.launching import allocate
from octavo.numerics import AmaxRecord, CastSpec, Measurement, Nonfinite, PerTensor, QuantizedTensor, ScaleRounding
from octavo.numerics.cast import round_stochastic_by_torch
from octavo.numerics.granularity import granularity_as_list, granularity_from_list
from octavo.numerics.quantized import stored_scale
from octavo.numerics.random_bits import random_bits_by_torch

__all__ = ["traced_cast"]


def traced_cast(
    x: Tensor,
    spec: CastSpec,
    *,
    transpose: bool = False,
    record: AmaxRecord | None,
    **source: Unpack[ScaleSource],
) -> CastResult:
    """Cast by an operator; ``transpose`` on a GPU only. It measures unless ``record`` has no buffers."""
    measured = record is None or record.gathers
    arguments = (
        *(x.detach(), spec.format.torch_dtype, granularity_as_list(spec.granularity)),
        *(spec.scale_rounding, spec.amax_floor, spec.margin, spec.nonfinite == Nonfinite.PROPAGATE),
        *(source.get("amax"), source.get("scale"), source.get("measure_if_zero", False), measured, sources()),
    )
    transposed = None
    if transpose:
        codes, scale, codes_t, scale_t, amaxes, count = torch.ops.octavo.cast_both_ways(*arguments)
        scale_t = scale if isinstance(spec.granularity, PerTensor) else scale_t
        transposed = _operand(codes_t, scale_t, spec, x.dtype)
    else:
        codes, scale, amaxes, count = torch.ops.octavo.cast(*arguments)
    measurement = Measurement(amaxes, count) if measured else None
    return CastResult(_operand(codes, scale, spec, x.dtype), transposed, measurement)


def _operand(codes: Tensor, scale: Tensor, spec: CastSpec, hp_dtype: torch.dtype) -> QuantizedTensor:
    return QuantizedTensor(codes, stored_scale(scale, spec.scale_format), spec.granularity, hp_dtype)


def _spec(  # noqa: PLR0917 (an operator's schema)
    dtype: torch.dtype, block: list[int], rounding: str, amax_floor: float, margin: int, propagate: bool
) -> CastSpec:
    """A description from an operator's arguments; numbers that a graph made symbols of become numbers again."""
    return CastSpec(
        format=format_of(dtype),
        granularity=granularity_from_list(block),
        scale_rounding=ScaleRounding(rounding),
        amax_floor=float(amax_floor),
        margin=int(margin),
        nonfinite=Nonfinite.PROPAGATE if propagate else Nonfinite.SATURATE,
    )


def _cast(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *described, amax, scale, measure_if_zero, _, _ = arguments  # a CPU measures in any case
    spec = _spec(*described)
    output, _, measurement, *_ = native_bindings.cast(x, spec, amax=amax, scale=scale, measure_if_zero=measure_if_zero)
    assert measurement is not None
    # The shape function's strides, where a size is 1 too.
    codes = output.data.as_strided(x.shape, native_bindings.codes_strides(x))
    scales, amaxes = (each.clone(memory_format=torch.contiguous_format) for each in (output.scale, measurement.amax))
    count = measurement.nonfinite
    return codes, scales, amaxes, torch.zeros((), dtype=torch.int64, device="cpu") if count is None else count


def _cast_on_gpu(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    result = _run_on_gpu(x, *arguments)
    return result.output.data, result.output.scale, *_measured(result)


def _cast_both_ways_on_gpu(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    result = _run_on_gpu(x, *arguments, transpose=True)
    output, transposed = result.output, result.transposed
    assert transposed is not None
    # Two of an operator's results share no memory: [0] where the transpose's scale is the tensor's.
    scale_t = transposed.scale.new_empty(0) if transposed.scale is output.scale else transposed.scale
    return output.data, output.scale, transposed.data, scale_t, *_measured(result)


def _measured(result: CastResult) -> tuple[Tensor, Tensor]:
    """Amaxes and count; memory that holds nothing where they are not read."""
    measurement, scale = result.measurement, result.output.scale
    if measurement is None:
        return torch.empty_like(scale), allocate(scale, (), torch.int64)
    assert measurement.nonfinite is not None
    return measurement.amax, measurement.nonfinite


def _run_on_gpu(x: Tensor, *arguments: Any, transpose: bool = False) -> CastResult:
    *described, amax, scale, measure_if_zero, measured, _ = arguments
    return triton_bindings.cast(
        x,
        _spec(*described),
        amax=amax,
        scale=scale,
        measure_if_zero=measure_if_zero,
        transpose=transpose,
        record=None if measured else AmaxRecord(),
    )


def _cast_shapes(x: Tensor, dtype: torch.dtype, block: list[int], *_: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    codes = x.new_empty(x.shape, dtype=dtype)  # contiguous
    if not x.is_cuda:
        codes = torch.empty_strided(x.shape, native_bindings.codes_strides(x), dtype=dtype, device=x.device)
    scale = x.new_empty(granularity_from_list(block).scale_shape(x.shape), dtype=torch.float32)
    return codes, scale, torch.empty_like(scale), x.new_empty((), dtype=torch.int64)


def _cast_both_ways_shapes(
    x: Tensor, dtype: torch.dtype, block: list[int], *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    transposed_shape = x.shape[::-1]
    groups = granularity_from_list(block)
    codes, codes_t = x.new_empty(x.shape, dtype=dtype), x.new_empty(transposed_shape, dtype=dtype)
    scale = x.new_empty(groups.scale_shape(x.shape), dtype=torch.float32)
    shape_t = (0,) if isinstance(groups, PerTensor) else groups.scale_shape(transposed_shape)
    scale_t = x.new_empty(shape_t, dtype=torch.float32)
    return codes, scale, codes_t, scale_t, torch.empty_like(scale), x.new_empty((), dtype=torch.int64)


_ARGUMENTS = (
    "(Tensor x, ScalarType dtype, int[] block, str rounding, float amax_floor, int margin, bool propagate, "
    "Tensor? amax, Tensor? scale, bool zero_is_unknown, bool measured, str sources)"
)
torch.library.define("octavo::cast", f"{_ARGUMENTS} -> (Tensor, Tensor, Tensor, Tensor)")
torch.library.impl("octavo::cast", "CPU")(_cast)
torch.library.impl("octavo::cast", "CUDA")(_cast_on_gpu)
torch.library.register_fake("octavo::cast")(_cast_shapes)
inline_kernels("octavo::cast", _cast_on_gpu)
torch.library.define("octavo::cast_both_ways", f"{_ARGUMENTS} -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
torch.library.impl("octavo::cast_both_ways", "CUDA")(_cast_both_ways_on_gpu)
torch.library.register_fake("octavo::cast_both_ways")(_cast_both_ways_shapes)
inline_kernels("octavo::cast_both_ways", _cast_both_ways_on_gpu)


def _round_stochastic(scaled: Tensor, random: Tensor, dtype: torch.dtype) -> Tensor:
    if native_bindings.supports(scaled, format_of(dtype)):
        return native_bindings.round_stochastic(scaled, random, format_of(dtype))
    return round_stochastic_by_torch(scaled, random, dtype)


torch.library.impl("octavo::round_stochastic", "CPU")(_round_stochastic)


def _round_stochastic_on_gpu(scaled: Tensor, random: Tensor, dtype: torch.dtype) -> Tensor:
    if triton_bindings.supports(scaled, format_of(dtype), PerTensor()):
        return triton_bindings.round_stochastic(scaled, random, format_of(dtype))
    return round_stochastic_by_torch(scaled, random, dtype)


torch.library.impl("octavo::round_stochastic", "CUDA")(_round_stochastic_on_gpu)


def _random_bits(seed: Tensor, count: int) -> Tensor:
    return (
        random_bits_by_torch(seed, count) if native_bindings.why_absent() else native_bindings.random_bits(seed, count)
    )


torch.library.impl("octavo::random_bits", "CPU")(_random_bits)
torch.library.impl("octavo::random_bits", "CUDA")(triton_bindings.random_bits)

"""Who casts: kernels for E4M3 and E5M2 on a CPU or GPU, octavo.numerics for everything else; the numbers are the same.

In a traced graph a kernel's cast is one operator, ``octavo::cast``: a compiler would write a slower loop of its own.
On a GPU ``torch.compile`` sees the operator's kernels, and what it makes of the graph launches them by itself.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo.errors import ConfigError
from octavo.formats import FP32, Format, format_of
from octavo.kernels import native_bindings, triton_bindings
from octavo.kernels.tracing import SOURCES, inline_kernels, is_traced, unaliased
from octavo.kernels.triton.launching import allocate
from octavo.numerics import (
    Granularity,
    Measurement,
    Nonfinite,
    PerTensor,
    QuantizedTensor,
    Record,
    Rounding,
    ScaleRounding,
    dequantize,
    measure,
)
from octavo.numerics import quantize as quantize_by_torch
from octavo.numerics.cast import NONFINITE_POLICIES, check_float, check_policy, round_stochastic_by_torch
from octavo.numerics.granularity import granularity_as_list, granularity_from_list, granularity_or_default
from octavo.numerics.quantized import check_cast, dequantize_by_torch, stored_scale
from octavo.numerics.random_bits import random_bits_by_torch
from octavo.numerics.scaling import AMAX_FLOOR, check_scale_options

__all__ = ["fake_quantize", "quantize", "quantize_and_measure", "quantize_both_ways"]


def quantize(
    x: Tensor,
    fmt: Format,
    *,
    granularity: Granularity | None = None,
    amax: Tensor | None = None,
    scale: Tensor | None = None,
    scale_rounding: ScaleRounding = ScaleRounding.FP32,
    scale_format: Format = FP32,
    amax_floor: float = AMAX_FLOOR,
    margin: int = 0,
    nonfinite: Nonfinite = Nonfinite.PROPAGATE,
) -> QuantizedTensor:
    """Scale into the format's range and round to nearest even, saturating.

        encode_scale = maximum · 2^-margin / amax;  data = cast(fp32(x) · encode_scale);  scale = 1 / encode_scale

    Args:
        x: float16, bfloat16, float32 or float64 (taken as float32); any shape the granularity allows. No gradient
            passes through; :func:`octavo.fake_quantize` lets one.
        fmt: one of the FP8 formats.
        granularity: which elements share a scale; None is one scale for the tensor.
        amax: the largest magnitude to provide for, in the scale's shape; None measures ``x`` (dynamic scaling). What
            lies beyond saturates.
        scale: a fixed decode scale instead (static scaling); ``scale_rounding``, ``amax_floor`` and ``margin`` play no
            part then.
        scale_rounding: which numbers the scale may be; the rules stand in numerics/scaling.py.
        scale_format: FP32, or E8M0 for one byte a scale, which must be a power of two.
        amax_floor: smaller amaxes count as this; torchao's is 1e-12.
        margin: binades to leave free above amax.
        nonfinite: what an infinite element becomes; NaN stays NaN. Neither changes any other element.

    Raises:
        ConfigError: not a float tensor, not an FP8 format, a scale of the wrong shape or not positive and finite, an
            amax that is negative or not finite, both ``amax`` and ``scale``, or a negative margin or floor.

    Example:
        >>> import octavo
        >>> q = quantize(torch.tensor([0.1, -0.2, 0.4]), octavo.E4M3)
        >>> q.dequantize()
        tensor([ 0.1000, -0.2000,  0.4000])

    Source: formula of numerics/scaling.py; rounding of numerics/cast.py.
    """
    groups = granularity_or_default(granularity)
    check_cast(x, fmt, groups, amax, scale, scale_rounding=scale_rounding, scale_format=scale_format)
    check_policy(nonfinite, NONFINITE_POLICIES, "nonfinite")
    check_scale_options(scale_rounding, amax_floor, margin)
    rule = native_bindings.ScaleRule(scale_rounding, amax_floor, margin)
    return quantize_and_measure(
        x, fmt, groups, rule, scale_format=scale_format, nonfinite=nonfinite, amax=amax, scale=scale, into=Record()
    )[0]


def quantize_and_measure(
    x: Tensor,
    fmt: Format,
    granularity: Granularity,
    rule: native_bindings.ScaleRule,
    *,
    scale_format: Format = FP32,
    nonfinite: Nonfinite = Nonfinite.PROPAGATE,
    amax: Tensor | None = None,
    scale: Tensor | None = None,
    zero_is_unknown: bool = False,
    rounding: Rounding = Rounding.NEAREST,
    into: Record | None = None,
) -> tuple[QuantizedTensor, Measurement | None]:
    """:func:`quantize` without its checks, and what was found in ``x`` on the way.

    Args:
        x: as there.
        fmt: as there.
        granularity: as there.
        rule: how amaxes become scales.
        scale_format: as there.
        nonfinite: as there.
        amax: as there.
        scale: as there.
        zero_is_unknown: whether a group whose given amax is 0 provides for what is measured in it.
        rounding: a stochastic cast is octavo.numerics' own, and draws its seed from torch's default generator.
        into: where to record what was found, unless ``x`` is empty. A kernel on a GPU records as it casts, and then
            what was found is not given back.
    """
    by_kernel = rounding == Rounding.NEAREST
    on_gpu = by_kernel and triton_bindings.supports(x, fmt, granularity, given=amax is not None or scale is not None)
    if not on_gpu and not (by_kernel and native_bindings.supports(x, fmt, granularity)):
        found = measure(x.detach(), granularity)
        if amax is not None and zero_is_unknown:
            amax = torch.where(amax > 0, amax, found.amax)
        quantized = quantize_by_torch(
            x,
            fmt,
            granularity=granularity,
            amax=amax,
            scale=scale,
            scale_rounding=rule.rounding,
            scale_format=scale_format,
            amax_floor=rule.amax_floor,
            margin=rule.margin,
            nonfinite=nonfinite,
            rounding=rounding,
            measurement=found,
        )
        return quantized, _recorded(x, found, into)
    options: dict[str, Any] = {
        "nonfinite": nonfinite, "amax": amax, "scale": scale, "zero_is_unknown": zero_is_unknown
    }  # fmt: skip
    if is_traced(x):
        codes, made, measured, count = torch.ops.octavo.cast(
            x.detach(),
            fmt.torch_dtype,
            granularity_as_list(granularity),
            *(rule.rounding, rule.amax_floor, rule.margin, nonfinite == Nonfinite.PROPAGATE),
            *(amax, scale, zero_is_unknown, _is_read(into), SOURCES),
        )
        seen = _recorded(x, Measurement(measured, count), into) if _is_read(into) else None
    elif on_gpu:
        on_device = triton_bindings.quantize(x, fmt, granularity, rule, into=into, **options)
        codes, made, seen = on_device.codes, on_device.scale, on_device.found
    else:
        cast = native_bindings.quantize(x, fmt, granularity, rule, **options)
        count = torch.tensor(cast.nonfinite, device="cpu") if cast.nonfinite else None
        codes, made, seen = cast.codes, cast.scale, _recorded(x, Measurement(cast.amax, count), into)
    return QuantizedTensor(codes, stored_scale(made, scale_format), granularity, x.dtype), seen


def quantize_both_ways(
    x: Tensor,
    fmt: Format,
    granularity: Granularity,
    rule: native_bindings.ScaleRule,
    *,
    scale_format: Format = FP32,
    nonfinite: Nonfinite = Nonfinite.PROPAGATE,
    amax: Tensor | None = None,
    scale: Tensor | None = None,
    zero_is_unknown: bool = False,
    rounding: Rounding = Rounding.NEAREST,
    into: Record | None = None,
) -> tuple[QuantizedTensor, QuantizedTensor, Measurement | None]:
    """A matrix and its transpose, each cast by itself, and what was found; arguments as :func:`quantize_and_measure`.

    A GPU makes both in one go, the codes of each contiguous, as its GEMM reads them. Elsewhere one cast serves both
    where their groups are the same, and the transpose is a view.
    """
    options: dict[str, Any] = {
        "nonfinite": nonfinite, "amax": amax, "scale": scale, "zero_is_unknown": zero_is_unknown
    }  # fmt: skip
    by_kernel = rounding == Rounding.NEAREST
    if not (by_kernel and triton_bindings.supports(x, fmt, granularity, given=amax is not None or scale is not None)):
        options |= {"scale_format": scale_format, "rounding": rounding}
        quantized, found = quantize_and_measure(x, fmt, granularity, rule, into=into, **options)
        if granularity.orientation_free:
            return quantized, quantized.t(), found
        turned, _ = quantize_and_measure(x.t(), fmt, granularity, rule, into=Record(), **options)
        return quantized, turned, found
    if is_traced(x):
        codes, made, codes_t, made_t, measured, count = torch.ops.octavo.cast_both_ways(
            x.detach(),
            fmt.torch_dtype,
            granularity_as_list(granularity),
            *(rule.rounding, rule.amax_floor, rule.margin, nonfinite == Nonfinite.PROPAGATE),
            *(amax, scale, zero_is_unknown, _is_read(into), SOURCES),
        )
        made_t = made if isinstance(granularity, PerTensor) else made_t
        seen = _recorded(x, Measurement(measured, count), into) if _is_read(into) else None
    else:
        cast = triton_bindings.quantize(x, fmt, granularity, rule, both_ways=True, into=into, **options)
        assert cast.transposed is not None
        codes, made, seen = cast.codes, cast.scale, cast.found
        codes_t, made_t = cast.transposed
    return (
        QuantizedTensor(codes, stored_scale(made, scale_format), granularity, x.dtype),
        QuantizedTensor(codes_t, stored_scale(made_t, scale_format), granularity, x.dtype),
        seen,
    )


def _is_read(into: Record | None) -> bool:
    """Whether what a cast finds goes anywhere: to the caller, or into a record that gathers."""
    return into is None or into.gathers


def _recorded(x: Tensor, found: Measurement, into: Record | None) -> Measurement:
    if into is not None and x.numel():
        into.add(found)
    return found


def fake_quantize(
    x: Tensor,
    fmt: Format,
    *,
    granularity: Granularity | None = None,
    scale_rounding: ScaleRounding = ScaleRounding.FP32,
    out: Tensor | None = None,
) -> Tensor:
    """Quantize and dequantize: the values FP8 would hold, in ``x``'s dtype; the gradient passes straight through.

    Args:
        x: as in :func:`octavo.quantize`.
        fmt: as in :func:`octavo.quantize`.
        granularity: as in :func:`octavo.quantize`.
        scale_rounding: as in :func:`octavo.quantize`.
        out: where to write, shaped like ``x`` and in its dtype; ``x`` itself rounds it in place. No gradient passes
            through then.

    Raises:
        ConfigError: what :func:`octavo.quantize` refuses, an ``out`` of another shape, dtype or device, or one where a
            gradient is wanted.

    Example:
        >>> from octavo.formats import E4M3
        >>> x = torch.tensor([0.3, 448.0], requires_grad=True)
        >>> y = fake_quantize(x, E4M3)
        >>> y.sum().backward()
        >>> y.tolist(), x.grad.tolist()
        ([0.3125, 448.0], [1.0, 1.0])
    """
    if out is not None:
        _check_out(x, out)
        with torch.no_grad():
            return _rounded(x, fmt, granularity, scale_rounding, out)
    result: Tensor = _FakeQuantize.apply(x, fmt, granularity, scale_rounding)  # type: ignore[no-untyped-call]
    return result


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: object, x: Tensor, fmt: Format, granularity: Granularity | None, scale_rounding: ScaleRounding
    ) -> Tensor:
        return unaliased(_rounded(x, fmt, granularity, scale_rounding))

    @staticmethod
    @once_differentiable
    def backward(ctx: object, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        return grad_output, None, None, None


def _rounded(
    x: Tensor, fmt: Format, granularity: Granularity | None, scale_rounding: ScaleRounding, out: Tensor | None = None
) -> Tensor:
    """The values, by one call of a kernel where there is one."""
    check_float(x, "the tensor to quantize")
    groups = granularity_or_default(granularity)
    on_gpu = triton_bindings.supports(x, fmt, groups) and triton_bindings.fakes(x, groups)
    if (
        not (on_gpu or native_bindings.supports(x, fmt, groups))
        or x.dtype not in native_bindings.DTYPES
        or is_traced(x)
    ):
        values = dequantize(quantize(x, fmt, granularity=groups, scale_rounding=scale_rounding))
        return values if out is None else out.copy_(values)
    check_cast(x, fmt, groups, None, None, scale_rounding=scale_rounding, scale_format=FP32)
    check_scale_options(scale_rounding, AMAX_FLOOR, 0)
    run = triton_bindings.fake_quantize if on_gpu else native_bindings.fake_quantize
    values = run(x, fmt, groups, native_bindings.ScaleRule(scale_rounding, AMAX_FLOOR, 0), out=out)
    if out is not None:
        torch.autograd.graph.increment_version(out)  # what was saved for a backward pass is no longer there
    return values


def _check_out(x: Tensor, out: Tensor) -> None:
    check_float(x, "the tensor to quantize")
    wanted = (tuple(x.shape), x.dtype, x.device)
    if (tuple(out.shape), out.dtype, out.device) != wanted:
        raise ConfigError(
            f"out must be like x, {wanted[1]} of shape {wanted[0]} on {wanted[2]}, "
            f"not {out.dtype} of shape {tuple(out.shape)} on {out.device}"
        )
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise ConfigError("fake_quantize cannot pass a gradient through out; leave out out, or call it in no_grad()")


def _cast(  # noqa: PLR0917 (an operator's schema)
    x: Tensor,
    dtype: torch.dtype,
    block: list[int],
    rounding: str,
    amax_floor: float,
    margin: int,
    propagate: bool,
    amax: Tensor | None,
    scale: Tensor | None,
    zero_is_unknown: bool,
    *_: object,  # here it is always measured
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    cast = native_bindings.quantize(
        x,
        format_of(dtype),
        granularity_from_list(block),
        native_bindings.ScaleRule(ScaleRounding(rounding), amax_floor, margin),
        nonfinite=Nonfinite.PROPAGATE if propagate else Nonfinite.SATURATE,
        amax=amax,
        scale=scale,
        zero_is_unknown=zero_is_unknown,
    )
    codes = cast.codes.as_strided(
        x.shape, native_bindings.codes_strides(x)
    )  # the shape function's strides, where a size is 1 too
    scales, amaxes = (made.clone(memory_format=torch.contiguous_format) for made in (cast.scale, cast.amax))
    return codes, scales, amaxes, torch.tensor(cast.nonfinite, device="cpu")


def _cast_on_gpu(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    cast = _run_on_gpu(x, *arguments)
    return cast.codes, cast.scale, *_apart(cast)


def _cast_both_ways_on_gpu(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    cast = _run_on_gpu(x, *arguments, both_ways=True)
    assert cast.transposed is not None
    codes, scale = cast.transposed
    return cast.codes, cast.scale, codes, _if_its_own(scale, cast.scale), *_apart(cast)


def _if_its_own(scale_t: Tensor, scale: Tensor) -> Tensor:
    """The transpose's scale, [0] where it is the tensor's: two of an operator's results share no memory."""
    return scale_t.new_empty(0) if scale_t is scale else scale_t


def _apart(cast: triton_bindings.Cast) -> tuple[Tensor, Tensor]:
    """What was measured, apart; memory that holds nothing where nobody reads it."""
    found = cast.found
    if found is None:
        return torch.empty_like(cast.scale), allocate(cast.scale, (), torch.int64)
    assert found.nonfinite is not None
    return found.amax, found.nonfinite


def _run_on_gpu(  # noqa: PLR0917 (an operator's schema)
    x: Tensor,
    dtype: torch.dtype,
    block: list[int],
    rounding: str,
    amax_floor: float,
    margin: int,
    propagate: bool,
    amax: Tensor | None,
    scale: Tensor | None,
    zero_is_unknown: bool,
    measured: bool,
    _: str,
    *,
    both_ways: bool = False,
) -> triton_bindings.Cast:
    return triton_bindings.quantize(
        x,
        format_of(dtype),
        granularity_from_list(block),
        native_bindings.ScaleRule(ScaleRounding(rounding), amax_floor, margin),
        nonfinite=Nonfinite.PROPAGATE if propagate else Nonfinite.SATURATE,
        amax=amax,
        scale=scale,
        zero_is_unknown=zero_is_unknown,
        both_ways=both_ways,
        into=None if measured else Record(),
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
    turned = x.shape[::-1]
    groups = granularity_from_list(block)
    codes, codes_t = x.new_empty(x.shape, dtype=dtype), x.new_empty(turned, dtype=dtype)
    scale = x.new_empty(groups.scale_shape(x.shape), dtype=torch.float32)
    shape_t = (0,) if isinstance(groups, PerTensor) else groups.scale_shape(turned)
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


def _dequantize(codes: Tensor, scale: Tensor, granularity: list[int], dtype: torch.dtype) -> Tensor:
    groups = granularity_from_list(granularity)
    if not native_bindings.decodes(codes, dtype, groups):
        return dequantize_by_torch(codes, scale, granularity, dtype)
    return native_bindings.dequantize(codes, scale, groups, dtype)


torch.library.impl("octavo::dequantize", "CPU")(_dequantize)


def _round_stochastic(scaled: Tensor, random: Tensor, dtype: torch.dtype) -> Tensor:
    if native_bindings.supports(scaled, format_of(dtype)):
        return native_bindings.round_stochastic(scaled, random, format_of(dtype))
    return round_stochastic_by_torch(scaled, random, dtype)


torch.library.impl("octavo::round_stochastic", "CPU")(_round_stochastic)


def _dequantize_on_gpu(codes: Tensor, scale: Tensor, granularity: list[int], dtype: torch.dtype) -> Tensor:
    groups = granularity_from_list(granularity)
    if not triton_bindings.decodes(codes, dtype, groups):
        return dequantize_by_torch(codes, scale, granularity, dtype)
    return triton_bindings.dequantize(codes, scale, groups, dtype)


def _round_stochastic_on_gpu(scaled: Tensor, random: Tensor, dtype: torch.dtype) -> Tensor:
    if triton_bindings.supports(scaled, format_of(dtype), PerTensor()):
        return triton_bindings.round_stochastic(scaled, random, format_of(dtype))
    return round_stochastic_by_torch(scaled, random, dtype)


torch.library.impl("octavo::dequantize", "CUDA")(_dequantize_on_gpu)
torch.library.impl("octavo::round_stochastic", "CUDA")(_round_stochastic_on_gpu)


def _random_bits(seed: Tensor, count: int) -> Tensor:
    return (
        random_bits_by_torch(seed, count) if native_bindings.why_absent() else native_bindings.random_bits(seed, count)
    )


torch.library.impl("octavo::random_bits", "CPU")(_random_bits)
torch.library.impl("octavo::random_bits", "CUDA")(triton_bindings.random_bits)

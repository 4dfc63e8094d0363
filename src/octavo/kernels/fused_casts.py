"""Norms and activations whose result is cast before it leaves the kernel: checks, operators and calls.

Triton's kernels run them (kernels/triton/norms.py and activations.py count the bytes moved). A traced graph sees one
operator for each, ``octavo::norm_cast``, ``norm_backward``, ``activation_cast`` and ``activation_backward``.
``torch.compile`` sees the kernels of the backward passes; those that cast are built without fused multiply-adds, an
option that inductor would drop.
"""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from octavo.formats import E8M0, FP32, format_of
from octavo.kernels.backend import inside_transform
from octavo.kernels.native_bindings import CODES, DTYPES
from octavo.kernels.result_cast import NormSpec, ResultBuffers, ResultCast, new_buffers
from octavo.kernels.tracing import inline_kernels, is_traced, sources
from octavo.kernels.triton.launching import WHY_ABSENT
from octavo.numerics import CastSpec, Nonfinite, PerBlock, ScaleRounding
from octavo.numerics.granularity import granularity_as_list, granularity_from_list

__all__ = [
    "DEVICES",
    "FUNCTIONS",
    "LONGEST_LAYERNORM",
    "LONGEST_ROW",
    "activation_backward",
    "cast_activation",
    "cast_norm",
    "no_kernel_reason",
    "norm_backward",
    "wrong_place_reason",
]

DEVICES = ("cuda",)
FUNCTIONS = ("gelu", "gelu_tanh", "qgelu", "relu", "silu", "srelu")
LONGEST_ROW = 16384  # elements that fit in the registers of one program
LONGEST_LAYERNORM = 8192  # its parameters' two running sums take registers too
_BLOCK_WIDTHS = (16, 32, 64, 128)  # that divide a tile


def wrong_place_reason(x: Tensor) -> str | None:
    """Reason why no kernel runs on the device of ``x``; None where they do."""
    if x.device.type not in DEVICES:
        return f"the kernels run on {', '.join(DEVICES)}, and the tensor is on {x.device}"
    if inside_transform():
        return "the kernels do not support torch.func"
    return WHY_ABSENT


def no_kernel_reason(x: Tensor, columns: int, cast: ResultCast, *, longest: int = LONGEST_ROW) -> str | None:
    """Reason why no kernel computes a result of this width from ``x`` and casts it so; None where one does."""
    return next(_unsupported_reasons(x, columns, cast, longest), None)


def _unsupported_reasons(x: Tensor, columns: int, cast: ResultCast, longest: int) -> Iterator[str]:
    groups = cast.spec.granularity
    if x.dtype not in DTYPES:
        yield f"the kernels read float32, bfloat16 and float16, not {x.dtype}"
    if x.numel() == 0:
        yield "the tensor is empty"
    if columns > longest:
        yield f"a row of {columns} is longer than {longest}"
    if cast.spec.engine is not None:
        yield "the kernels make octavo's scales, not another engine's"
    if cast.spec.format.torch_dtype not in CODES:
        yield f"the kernels write E4M3 and E5M2, not {cast.spec.format}"
    if isinstance(groups, PerBlock) and (groups.rows != 1 or groups.columns not in _BLOCK_WIDTHS):
        yield f"the kernels scale blocks of one row and {', '.join(map(str, _BLOCK_WIDTHS))} columns, not {groups}"


def cast_norm(
    x: Tensor,
    gain: Tensor,
    bias: Tensor | None,
    norm: NormSpec,
    cast: ResultCast,
    *,
    result_dtype: torch.dtype,
    amax: Tensor | None = None,
    scale: Tensor | None = None,
) -> tuple[ResultBuffers, Tensor, Tensor]:
    """Normalise the rows of ``x`` in FP32, round to ``result_dtype``, cast.

    Args:
        x: [R, H], contiguous; float32, bfloat16 or float16.
        gain: [H], any float dtype.
        bias: [H] or None.
        norm: which norm.
        cast: how the result is cast.
        result_dtype: dtype that the result is rounded to first: x's; if that is float32, any of the three.
        amax: float32 [], from which the scale of the tensor is computed, unless it is 0.
        scale: float32 [], the decode scale to use instead.

    Returns:
        The operands, and mean (empty for an RMSNorm) and rstd, float32 [R], for :func:`norm_backward`.
    """
    if is_traced(x):
        *parts, mean, rstd = torch.ops.octavo.norm_cast(
            *(x, gain, bias, norm.layer, norm.eps, norm.zero_centered, result_dtype, amax, scale, *_as_arguments(cast))
        )
        buffers = ResultBuffers(*parts)
    else:
        buffers, mean, rstd = _norms().cast_norm(
            x, gain, bias, norm, cast, result_dtype=result_dtype, amax=amax, scale=scale
        )
    return buffers, mean, rstd


def norm_backward(  # noqa: PLR0917 (a backward's inputs)
    grad_y: Tensor, x: Tensor, gain: Tensor, mean: Tensor, rstd: Tensor, norm: NormSpec, *, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, in its dtype, and of gain and bias, float32 [H]; the last is empty without a bias."""
    if is_traced(x):
        gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.octavo.norm_backward(
            grad_y, x, gain, mean, rstd, norm.layer, norm.zero_centered, has_bias, sources()
        )
    else:
        gradients = _norms().norm_backward(grad_y, x, gain, mean, rstd, norm, has_bias=has_bias)
    return gradients


def cast_activation(
    x: Tensor,
    function: str,
    cast: ResultCast,
    *,
    gated: bool,
    amax: Tensor | None = None,
    scale: Tensor | None = None,
) -> ResultBuffers:
    """f(x), or f(first half) · second half, in ``x``'s dtype, cast.

    Args:
        x: [R, F], [R, 2F] if gated; contiguous; float32, bfloat16 or float16.
        function: one of :data:`FUNCTIONS`.
        cast: how the result is cast.
        gated: whether x carries a gate.
        amax: as in :func:`cast_norm`.
        scale: as in :func:`cast_norm`.
    """
    if is_traced(x):
        return ResultBuffers(*torch.ops.octavo.activation_cast(x, function, gated, amax, scale, *_as_arguments(cast)))
    buffers: ResultBuffers = _activations().cast_activation(x, function, cast, gated=gated, amax=amax, scale=scale)
    return buffers


def activation_backward(grad_y: Tensor, x: Tensor, function: str, *, gated: bool) -> Tensor:
    """The gradient of x, in its shape and dtype."""
    if is_traced(x):
        grad: Tensor = torch.ops.octavo.activation_backward(grad_y, x, function, gated, sources())
    else:
        grad = _activations().activation_backward(grad_y, x, function, gated=gated)
    return grad


def _as_arguments(cast: ResultCast) -> tuple[object, ...]:
    """A cast as the last arguments of :data:`_CAST`."""
    spec = cast.spec
    e8m0, propagate = spec.scale_format == E8M0, spec.nonfinite == Nonfinite.PROPAGATE
    numbers = (str(spec.scale_rounding), spec.amax_floor, spec.margin)
    groups = granularity_as_list(spec.granularity)
    return (spec.format.torch_dtype, groups, *numbers, e8m0, propagate, cast.direct, cast.transpose)


def _from_arguments(  # noqa: PLR0917 (an operator's schema)
    dtype: torch.dtype,
    granularity: list[int],
    rounding: str,
    amax_floor: float,
    margin: int,
    e8m0: bool,
    propagate: bool,
    direct: bool,
    transpose: bool,
) -> ResultCast:
    spec = CastSpec(
        format=format_of(dtype),
        granularity=granularity_from_list(granularity),
        scale_rounding=ScaleRounding(rounding),
        scale_format=E8M0 if e8m0 else FP32,
        amax_floor=amax_floor,
        margin=margin,
        nonfinite=Nonfinite.PROPAGATE if propagate else Nonfinite.SATURATE,
    )
    return ResultCast(spec=spec, direct=direct, transpose=transpose)


def _norms() -> ModuleType:
    from octavo.kernels.triton import norms

    return norms


def _activations() -> ModuleType:
    from octavo.kernels.triton import activations

    return activations


def _norm_cast(  # noqa: PLR0917 (an operator's schema)
    x: Tensor,
    gain: Tensor,
    bias: Tensor | None,
    layer: bool,
    eps: float,
    zero_centered: bool,
    result_dtype: torch.dtype,
    amax: Tensor | None,
    scale: Tensor | None,
    *cast: Any,
) -> tuple[Tensor, ...]:
    norm, asked = NormSpec(layer=layer, eps=eps, zero_centered=zero_centered), _from_arguments(*cast)
    made, mean, rstd = _norms().cast_norm(x, gain, bias, norm, asked, result_dtype=result_dtype, amax=amax, scale=scale)
    return (*made, mean, rstd)


def _norm_cast_shapes(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    layer, cast = rest[2], rest[8:]
    rows, columns = x.shape
    mean, rstd = (x.new_empty(size, dtype=torch.float32) for size in (rows if layer else 0, rows))
    return (*new_buffers(x, columns, _from_arguments(*cast)), mean, rstd)


def _norm_backward(  # noqa: PLR0917 (an operator's schema)
    grad_y: Tensor,
    x: Tensor,
    gain: Tensor,
    mean: Tensor,
    rstd: Tensor,
    layer: bool,
    zero_centered: bool,
    has_bias: bool,
    _: str,
) -> tuple[Tensor, Tensor, Tensor]:
    norm = NormSpec(layer=layer, eps=0.0, zero_centered=zero_centered)  # eps is in rstd
    gradients: tuple[Tensor, Tensor, Tensor] = _norms().norm_backward(
        grad_y, x, gain, mean, rstd, norm, has_bias=has_bias
    )
    return gradients


def _norm_backward_shapes(_: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    has_bias = rest[-2]
    columns = x.shape[1]
    gain, bias = (x.new_empty(size, dtype=torch.float32) for size in (columns, columns if has_bias else 0))
    return torch.empty_like(x), gain, bias


def _activation_cast(
    x: Tensor, function: str, gated: bool, amax: Tensor | None, scale: Tensor | None, *cast: Any
) -> tuple[Tensor, ...]:
    asked = _from_arguments(*cast)
    return tuple(_activations().cast_activation(x, function, asked, gated=gated, amax=amax, scale=scale))


def _activation_cast_shapes(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    gated, cast = rest[1], rest[4:]
    return tuple(new_buffers(x, x.shape[1] // 2 if gated else x.shape[1], _from_arguments(*cast)))


def _activation_backward(grad_y: Tensor, x: Tensor, function: str, gated: bool, _: str) -> Tensor:
    grad: Tensor = _activations().activation_backward(grad_y, x, function, gated=gated)
    return grad


def _activation_backward_shapes(_: Tensor, x: Tensor, *__: Any) -> Tensor:
    return torch.empty_like(x)


def _register(name: str, schema: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> None:
    torch.library.define(f"octavo::{name}", schema)
    torch.library.impl(f"octavo::{name}", "CompositeExplicitAutograd")(run)
    torch.library.register_fake(f"octavo::{name}")(shapes)


_CAST = (
    "Tensor? amax, Tensor? scale, ScalarType dtype, int[] granularity, str rounding, float amax_floor, int margin, "
    "bool e8m0, bool propagate, bool direct, bool transpose"
)
# "handed_on" is the result's dtype: exported graphs hold the schema's names.
_NORM = "Tensor x, Tensor gain, Tensor? bias, bool layer, float eps, bool zero_centered, ScalarType handed_on"
_MADE = "Tensor, Tensor, Tensor, Tensor, Tensor"
_register("norm_cast", f"({_NORM}, {_CAST}) -> ({_MADE}, Tensor, Tensor)", _norm_cast, _norm_cast_shapes)
_register(
    "activation_cast",
    f"(Tensor x, str function, bool gated, {_CAST}) -> ({_MADE})",
    _activation_cast,
    _activation_cast_shapes,
)
_register(
    "norm_backward",
    "(Tensor grad_y, Tensor x, Tensor gain, Tensor mean, Tensor rstd, bool layer, bool zero_centered, bool has_bias, "
    "str sources) "
    "-> (Tensor, Tensor, Tensor)",
    _norm_backward,
    _norm_backward_shapes,
)
inline_kernels("octavo::norm_backward", _norm_backward)
_register(
    "activation_backward",
    "(Tensor grad_y, Tensor x, str function, bool gated, str sources) -> Tensor",
    _activation_backward,
    _activation_backward_shapes,
)
inline_kernels("octavo::activation_backward", _activation_backward)

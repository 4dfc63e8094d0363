"""Custom operators for casts in an exported graph, and their translation to ONNX nodes.

| operator               | computes (by octavo.numerics)             | ONNX nodes                                     |
|------------------------|-------------------------------------------|------------------------------------------------|
| ``graph_quantize``     | codes = RNE(fp32(x) · encode_scale)       | Cast, Mul, QuantizeLinear with scale 1         |
| ``graph_dequantize``   | codes · scale, in the scale's dtype       | DequantizeLinear                               |
| ``graph_encode_scale`` | the encode scale from x's amax; 1 for an  | Abs, ReduceMax, Cast, Max, Div, Clip, Where;   |
|                        | all-zero group                            | powers of two by look-up in a table            |

QuantizeLinear has scale 1 after a multiplication because QuantizeLinear divides, while octavo multiplies by the
reciprocal. The results differ in the last bit of FP32, which changes codes of one bfloat16 tensor in fifty, whose
elements often lie on a tie. A 16-bit QuantizeLinear would also round the quotient twice. In this form the codes are
octavo's in every engine, and a computed scale is not an input of QuantizeLinear, for which TensorRT requires a
constant.

Division is in FP32: for FP32 operands a quotient in FP64, rounded to FP32, is identical.

The operators are opaque to ``torch.export`` and translated individually (``custom_translation_table``). A plain
``Tensor.to(torch.float8_e4m3fn)`` would become a Cast, which TensorRT refuses and optimisers fold back to FP32.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.formats import E4M3
from octavo.numerics import Granularity, PerRow, PerTensor, ScaleRounding, encode_scale_from_amax, measure
from octavo.numerics.cast import cast_nearest

__all__ = ["encode_scale", "from_codes", "in_dtype", "to_codes", "translations"]

_LIBRARY = "octavo"
_SMALLEST, _LARGEST = (getattr(torch.finfo(torch.float32), name) for name in ("tiny", "max"))
_SUBNORMAL = _SMALLEST * torch.finfo(torch.float32).eps  # smallest nonzero amax


def to_codes(x: Tensor, encode_scale: Tensor) -> Tensor:
    """Cast ``x`` times ``encode_scale``, in FP32, to E4M3 codes; saturates."""
    codes: Tensor = torch.ops.octavo.graph_quantize(x, encode_scale)
    return codes


def from_codes(codes: Tensor, scale: Tensor, *, axis: int = 0) -> Tensor:
    """Decode codes: ``codes · scale`` in the scale's dtype.

    Args:
        codes: E4M3.
        scale: [], or [size of ``axis``].
        axis: dimension of a vector of scales.
    """
    decoded: Tensor = torch.ops.octavo.graph_dequantize(codes, scale, axis)
    return decoded


def encode_scale(x: Tensor, *, per_row: bool, power_of_two: bool, amax_floor: float, margin: int) -> Tensor:
    """Encode scale that maps the amax of ``x`` to E4M3's maximum, FP32 [1, …] or [..., 1]; 1 if the amax is 0."""
    made: Tensor = torch.ops.octavo.graph_encode_scale(x, per_row, power_of_two, amax_floor, margin)
    return made


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to ``dtype`` only if needed: ``torch.export`` would also record a cast without effect."""
    return x if x.dtype is dtype else x.to(dtype)


def _quantize(x: Tensor, encode_scale: Tensor) -> Tensor:
    return cast_nearest(x, E4M3, encode_scale)


def _dequantize(codes: Tensor, scale: Tensor, axis: int) -> Tensor:
    along = scale if scale.ndim == 0 else scale.reshape([-1 if i == axis else 1 for i in range(codes.ndim)])
    return (codes.float() * along.float()).to(scale.dtype)


def _encode_scale(x: Tensor, per_row: bool, power_of_two: bool, amax_floor: float, margin: int) -> Tensor:
    rounding = ScaleRounding.RCEIL if power_of_two else ScaleRounding.FP32
    granularity: Granularity = PerRow() if per_row else PerTensor()
    amax = measure(x, granularity).amax
    scale = encode_scale_from_amax(amax, E4M3, rounding=rounding, amax_floor=amax_floor, margin=margin)
    return torch.where(amax == 0, 1.0, scale).reshape(_scale_shape(x, per_row=per_row))


def _scale_shape(x: Tensor, *, per_row: bool) -> list[int]:
    return [*x.shape[:-1], 1] if per_row else [1] * x.ndim


def _define(name: str, signature: str, compute: Callable[..., Tensor], shape: Callable[..., Tensor]) -> None:
    torch.library.define(f"{_LIBRARY}::{name}", signature)
    torch.library.impl(f"{_LIBRARY}::{name}", "CompositeExplicitAutograd")(compute)
    torch.library.register_fake(f"{_LIBRARY}::{name}")(shape)


_define(
    "graph_quantize",
    "(Tensor x, Tensor encode_scale) -> Tensor",
    _quantize,
    lambda x, *_: torch.empty_like(x, dtype=E4M3.torch_dtype),
)
_define(
    "graph_dequantize",
    "(Tensor codes, Tensor scale, int axis) -> Tensor",
    _dequantize,
    lambda codes, scale, _: torch.empty_like(codes, dtype=scale.dtype),
)
_define(
    "graph_encode_scale",
    "(Tensor x, bool per_row, bool power_of_two, float amax_floor, int margin) -> Tensor",
    _encode_scale,
    lambda x, per_row, *_: x.new_empty(_scale_shape(x, per_row=per_row), dtype=torch.float32),
)


def translations(opset: int) -> dict[Callable[..., Any], Callable[..., Any]]:
    """ONNX translation of each operator, for ``torch.onnx.export(custom_translation_table=…)``."""
    import onnx
    import onnxscript

    op: Any = getattr(onnxscript, f"opset{opset}")
    fp8, fp32 = onnx.TensorProto.FLOAT8E4M3FN, onnx.TensorProto.FLOAT

    def constant(*values: float, shape: tuple[int, ...] = ()) -> Any:
        return op.Constant(value=onnx.helper.make_tensor("", fp32, shape, values))

    def quantize(x: Any, encode_scale: Any) -> Any:
        scaled = op.Mul(op.Cast(x, to=fp32), encode_scale)
        zero = op.Constant(value=onnx.helper.make_tensor("", fp8, (), [0.0]))
        return op.QuantizeLinear(scaled, constant(1.0), zero)

    def dequantize(codes: Any, scale: Any, axis: int) -> Any:
        return op.DequantizeLinear(codes, scale, axis=axis)

    def encode_scale(x: Any, per_row: bool, power_of_two: bool, amax_floor: float, margin: int) -> Any:
        last = [op.Constant(value_ints=[-1])] if per_row else []
        amax = op.Cast(op.ReduceMax(op.Abs(x), *last, keepdims=1), to=fp32)
        quotient = op.Div(constant(E4M3.max * 2.0**-margin), op.Max(amax, constant(max(amax_floor, _SUBNORMAL))))
        result = op.Clip(quotient, constant(_SMALLEST), constant(_LARGEST))
        if power_of_two:
            powers = constant(*_powers_of_two(), shape=(len(_powers_of_two()),))
            reached = op.Where(op.LessOrEqual(powers, result), powers, constant(0.0))
            result = op.ReduceMax(reached, op.Constant(value_ints=[-1]), keepdims=1)
        return op.Where(op.Equal(amax, constant(0.0)), constant(1.0), result)

    ops = torch.ops.octavo
    return {
        ops.graph_quantize.default: quantize,
        ops.graph_dequantize.default: dequantize,
        ops.graph_encode_scale.default: encode_scale,
    }


def _powers_of_two() -> tuple[float, ...]:
    """All normal powers of two in FP32, ascending: rounding down by comparison is exact in every engine."""
    return tuple(math.ldexp(1.0, exponent) for exponent in range(math.frexp(_SMALLEST)[1] - 1, math.frexp(_LARGEST)[1]))

"""Linear layers as graph operators: input codes, weight codes, a product and a bias.

    static input     x → to_codes(encode_scale) → from_codes(scale) ─────┐
    dynamic input    x → encode_scale ─ to_codes → from_codes(unit) ─────┤ product [· factor] + bias
    weights only     x ──────────────────────────────────────────────────┤
    weight           codes [K, N] → from_codes(scale [] or [N]) ─────────┘

The weight's codes are the layer's own, transposed to [K, N]. The product is a MatMul of two decoded operands, which
TensorRT fuses into an FP8 GEMM.

TensorRT requires constant scales for Q and DQ, so a dynamic scale is a factor after the product. The codes are decoded
with a constant power of two that maps E4M3 below 1, so that 16-bit sums do not overflow.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from octavo.errors import ConfigError
from octavo.formats import E4M3
from octavo.functional import cast_operand
from octavo.nn import Linear
from octavo.numerics import PerRow, PerTensor, QuantizedTensor, ScaleRounding, encode_scale_from_amax
from octavo.onnx.operators import encode_scale, from_codes, in_dtype, to_codes
from octavo.recipes import CastSpec, Scaling
from octavo.scaling import INPUT, WEIGHT, LayerScaling

__all__ = [
    "HIGH_PRECISION",
    "DynamicCast",
    "GraphLinear",
    "LayerNote",
    "StaticCast",
    "graph_linear",
    "narrowed_scale",
    "unit_scale",
]

MOST_ROUNDING = torch.finfo(torch.bfloat16).eps / 2  # relative, of a scale: bfloat16's rounding
GRANULARITIES = (PerTensor, PerRow)
HIGH_PRECISION = "high precision"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNote:
    """Conversion result of one linear layer.

    Attributes:
        path: in the model.
        input: "static", "dynamic", "dynamic per row", or "high precision".
        weight: "per tensor", "per channel", or "high precision".
        reason: why an operand is not FP8; empty if both are.
    """

    path: str
    input: str
    weight: str
    reason: str = ""

    @property
    def is_fp8(self) -> bool:
        """True if both operands are codes."""
        return HIGH_PRECISION not in (self.input, self.weight)


class StaticCast(nn.Module):
    """Quantize and dequantize an input with a constant scale."""

    encode_scale: Tensor
    scale: Tensor

    def __init__(self, encode: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("encode_scale", encode)
        self.register_buffer("scale", scale)

    def encode(self, _: Tensor) -> Tensor:
        """Constant encode scale."""
        return self.encode_scale

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Decoded codes, without a factor."""
        return from_codes(to_codes(x, self.encode_scale), self.scale), None


class DynamicCast(nn.Module):
    """Quantize an input with a dynamic scale; decode with a constant below 1 and return the remaining factor."""

    unit: Tensor

    def __init__(self, spec: CastSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.per_row = isinstance(spec.granularity, PerRow)
        self.power_of_two = spec.scale_rounding is ScaleRounding.RCEIL
        self.amax_floor, self.margin = spec.amax_floor, spec.margin
        self.register_buffer("unit", unit_scale().to(dtype))
        self.inverse_unit = unit_scale().reciprocal().item()  # computed here, since forward is traced

    def encode(self, x: Tensor) -> Tensor:
        """Encode scale from the amax of ``x``."""
        return encode_scale(
            x,
            per_row=self.per_row,
            power_of_two=self.power_of_two,
            amax_floor=self.amax_floor,
            margin=self.margin,
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Decoded codes and the factor [..., 1], FP32."""
        encode = self.encode(x)
        return from_codes(to_codes(x, encode), self.unit), encode.reciprocal() * self.inverse_unit


class PlainInput(nn.Module):
    """Input without a cast."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return ``x`` unchanged."""
        return x, None


class GraphLinear(nn.Module):
    """Compute ``cast(x) @ decoded weight + bias``."""

    codes: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, cast: nn.Module, weight: QuantizedTensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.cast = cast
        self.register_buffer("codes", weight.data.t().contiguous())  # [K, N]
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N]."""
        operand, factor = self.cast(x)
        y: Tensor = operand @ from_codes(self.codes, self.scale, axis=1)
        if factor is not None:
            y = in_dtype(in_dtype(y, torch.float32) * factor, y.dtype)
        return y if self.bias is None else y + self.bias


def graph_linear(layer: Linear, dtype: torch.dtype, path: str) -> tuple[GraphLinear, LayerNote]:
    """Convert a layer for a graph of ``dtype``.

    Raises:
        ConfigError: the layer's recipe cannot be exported, or ``dtype`` cannot represent a scale.
    """
    weight = _weight(layer, path)
    cast, input_name = _input_cast(layer, dtype, path)
    vector = isinstance(weight.granularity, PerRow)
    scale = torch.where(_is_zero(weight), 1.0, weight.fp32_scale.flatten() if vector else weight.fp32_scale)
    layer_bias: Tensor | None = layer.bias
    bias = None if layer_bias is None else layer_bias.detach().to(dtype)
    graph_layer = GraphLinear(cast, weight, narrowed_scale(scale, dtype, f"the weight of {path!r}"), bias)
    reason = f"recipe {layer.recipe.name!r} casts no input" if input_name == HIGH_PRECISION else ""
    return graph_layer, LayerNote(
        path=path, input=input_name, weight="per channel" if vector else "per tensor", reason=reason
    )


def unit_scale() -> Tensor:
    """Power of two that maps E4M3's maximum below 1, FP32 []."""
    _, exponent = torch.frexp(torch.tensor(E4M3.max))
    return torch.ldexp(torch.tensor(1.0), -exponent)


def narrowed_scale(scale: Tensor, dtype: torch.dtype, of: str) -> Tensor:
    """Cast a scale to the graph's dtype.

    The relative rounding is up to 2^-8 in bfloat16 and 2^-11 in float16. Float16 is less precise below its smallest
    normal number, 2^-14, where many weights' scales lie: there as much rounding is allowed as in bfloat16.

    Raises:
        ConfigError: the scale is too small or too large for the dtype: its rounding exceeds 2^-8.
    """
    narrowed = scale.to(dtype)
    error = (narrowed.double() / scale.double() - 1).abs()
    if not (error <= MOST_ROUNDING).all():
        worst = scale.flatten()[error.argmax()]
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"the scale {worst.item():.3g} of {of} is outside the range of {name}; export with dtype bf16 or fp32"
        )
    return narrowed


def _weight(layer: Linear, path: str) -> QuantizedTensor:
    """Weight codes of the layer in evaluation."""
    spec = layer.recipe.output.b
    weight = layer.stored_codes()
    if weight is None:
        quantized = cast_operand(layer.weight.detach(), spec, _tap(layer).of(WEIGHT))
        assert isinstance(quantized, QuantizedTensor), "a layer in high precision is not converted"
        weight = quantized
    if weight.format != E4M3 or not isinstance(weight.granularity, GRANULARITIES):
        raise ConfigError(
            f"layer {path!r} has a weight in {weight.format}, {weight.granularity}; an ONNX graph supports E4M3 with a "
            "scale a tensor or a row: convert it with tensorwise, rowwise, static or weight_only"
        )
    return weight


def _input_cast(layer: Linear, dtype: torch.dtype, path: str) -> tuple[nn.Module, str]:
    """Cast module of the layer's input, and its name in the note."""
    spec = layer.recipe.output.a
    if spec is None:
        return PlainInput(), HIGH_PRECISION
    if spec.engine is not None:
        raise ConfigError(
            f"layer {path!r} runs {layer.recipe.name!r}, whose scales are another engine's; an ONNX graph casts as "
            "octavo does: convert it with tensorwise, rowwise or static"
        )
    rounding = (ScaleRounding.FP32, ScaleRounding.RCEIL)
    if spec.format != E4M3 or not isinstance(spec.granularity, GRANULARITIES) or spec.scale_rounding not in rounding:
        raise ConfigError(
            f"layer {path!r} casts its input to {spec.format}, {spec.granularity}, scales {spec.scale_rounding}; an "
            "ONNX graph supports E4M3 with a scale a tensor or a row, fp32 or rceil: convert it with tensorwise, "
            "rowwise or static"
        )
    encode = _constant_encode_scale(layer, spec, path)
    if encode is None:
        return DynamicCast(spec, dtype), "dynamic per row" if isinstance(spec.granularity, PerRow) else "dynamic"
    scale = layer.input_scale.detach().clone() if spec.scaling == Scaling.STATIC else encode.reciprocal()
    return StaticCast(encode, narrowed_scale(scale, dtype, f"the input of {path!r}")), "static"


def _constant_encode_scale(layer: Linear, spec: CastSpec, path: str) -> Tensor | None:
    """Encode scale of a calibrated input or of one with an amax history; None for dynamic scales."""
    if spec.scaling == Scaling.STATIC:
        if not layer.input_scale > 0:
            raise ConfigError(f"layer {path!r} has no scale for its static input; calibrate the model first")
        return layer.input_scale.detach().reciprocal().clamp(max=torch.finfo(torch.float32).max)
    amax = _tap(layer).of(INPUT).amax
    if spec.scaling == Scaling.DYNAMIC or amax is None or not amax > 0:
        return None
    return encode_scale_from_amax(
        amax, spec.format, rounding=spec.scale_rounding, amax_floor=spec.amax_floor, margin=spec.margin
    )


def _tap(layer: Linear) -> LayerScaling:
    """Amaxes that the layer uses in evaluation."""
    return LayerScaling(amaxes=None if layer.amax_history is None else layer.amax_history.amax.clone())


def _is_zero(weight: QuantizedTensor) -> Tensor:
    """Mask of the weight's scales whose codes are all zero."""
    zero = weight.data.float() == 0
    return zero.all(dim=1) if isinstance(weight.granularity, PerRow) else zero.all()

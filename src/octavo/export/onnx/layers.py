"""An octavo linear layer as the operators of a graph: codes of the input, codes of the weight, a product, a bias.

    static input     x → to_codes(encode_scale) → from_codes(scale) ─────┐
    dynamic input    x → encode_scale ─ to_codes → from_codes(unit) ─────┤ product [· factor] + bias
    weights only     x ──────────────────────────────────────────────────┤
    weight           codes [K, N] → from_codes(scale [] or [N]) ─────────┘

The weight's codes are those that the layer multiplies, held ones untouched, transposed to [K, N]: the product is a
plain MatMul of two decoded operands, the form that TensorRT turns into an FP8 product.

A dynamic scale leaves the product as a factor, since TensorRT takes constants only as scales of Q and DQ. The codes are
decoded by the constant power of two that brings E4M3 below 1, so that sums of 16 bits do not overflow.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from octavo.errors import ConfigError
from octavo.export.onnx.operators import encode_scale, from_codes, in_dtype, to_codes
from octavo.formats import E4M3
from octavo.functional import cast_operand
from octavo.nn import Linear
from octavo.numerics import PerRow, PerTensor, QuantizedTensor, ScaleRounding, encode_scale_from_amax
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

MOST_ROUNDING = torch.finfo(torch.bfloat16).eps / 2  # of a scale, relative: what bfloat16 does to any number
GRANULARITIES = (PerTensor, PerRow)
HIGH_PRECISION = "high precision"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNote:
    """What became of one linear layer.

    Attributes:
        path: in the model.
        input: "static", "dynamic", "dynamic per row", or "high precision".
        weight: "per tensor", "per channel", or "high precision".
        reason: why a part of it is not FP8; empty where all is.
    """

    path: str
    input: str
    weight: str
    reason: str = ""

    @property
    def is_fp8(self) -> bool:
        """Whether both operands are codes."""
        return HIGH_PRECISION not in (self.input, self.weight)


class StaticCast(nn.Module):
    """An input's codes by a constant scale, decoded again."""

    encode_scale: Tensor
    scale: Tensor

    def __init__(self, encode: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("encode_scale", encode)
        self.register_buffer("scale", scale)

    def encode(self, _: Tensor) -> Tensor:
        """The encode scale, whatever the tensor."""
        return self.encode_scale

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """What the codes decode to; no factor is left."""
        return from_codes(to_codes(x, self.encode_scale), self.scale), None


class DynamicCast(nn.Module):
    """An input's codes by the scale of its own amax, decoded to below 1, and the factor that is left."""

    unit: Tensor

    def __init__(self, spec: CastSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.per_row = isinstance(spec.granularity, PerRow)
        self.power_of_two = spec.scale_rounding is ScaleRounding.RCEIL
        self.amax_floor, self.margin = spec.amax_floor, spec.margin
        self.register_buffer("unit", unit_scale().to(dtype))
        self.left = unit_scale().reciprocal().item()  # computed here, as every operation of forward is traced

    def encode(self, x: Tensor) -> Tensor:
        """The encode scale of ``x``'s own amax."""
        return encode_scale(
            x,
            per_row=self.per_row,
            power_of_two=self.power_of_two,
            amax_floor=self.amax_floor,
            margin=self.margin,
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The codes times a unit, and the factor [..., 1], FP32."""
        encode = self.encode(x)
        return from_codes(to_codes(x, encode), self.unit), encode.reciprocal() * self.left


class PlainInput(nn.Module):
    """An input that is not cast."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Itself."""
        return x, None


class GraphLinear(nn.Module):
    """``cast(x) @ decoded weight + bias``."""

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
        """[..., K] to [..., N]."""
        operand, factor = self.cast(x)
        y: Tensor = operand @ from_codes(self.codes, self.scale, axis=1)
        if factor is not None:
            y = in_dtype(in_dtype(y, torch.float32) * factor, y.dtype)
        return y if self.bias is None else y + self.bias


def graph_linear(layer: Linear, dtype: torch.dtype, path: str) -> tuple[GraphLinear, LayerNote]:
    """The layer as a graph has it, in a graph of ``dtype``.

    Raises:
        ConfigError: the layer's recipe has no such form, or a scale that ``dtype`` cannot hold.
    """
    weight = _weight(layer, path)
    cast, how = _input_cast(layer, dtype, path)
    vector = isinstance(weight.granularity, PerRow)
    scale = torch.where(_is_zero(weight), 1.0, weight.fp32_scale.flatten() if vector else weight.fp32_scale)
    given: Tensor | None = layer.bias
    bias = None if given is None else given.detach().to(dtype)
    made = GraphLinear(cast, weight, narrowed_scale(scale, dtype, f"the weight of {path!r}"), bias)
    why = f"recipe {layer.recipe.name!r} casts no input" if how == HIGH_PRECISION else ""
    return made, LayerNote(path=path, input=how, weight="per channel" if vector else "per tensor", reason=why)


def unit_scale() -> Tensor:
    """The power of two that brings E4M3's maximum below 1, FP32 []."""
    _, exponent = torch.frexp(torch.tensor(E4M3.max))
    return torch.ldexp(torch.tensor(1.0), -exponent)


def narrowed_scale(scale: Tensor, dtype: torch.dtype, of: str) -> Tensor:
    """The scale in the graph's dtype.

    That rounds it by up to 2^-8 in bfloat16, by up to 2^-11 in float16. Float16 has fewer digits below its smallest
    normal number, 2^-14, where many weights' scales lie: there as much is let pass as bfloat16 takes.

    Raises:
        ConfigError: it is rounded by more than 2^-8, being too small or too large for the dtype.
    """
    held = scale.to(dtype)
    off = (held.double() / scale.double() - 1).abs()
    if not (off <= MOST_ROUNDING).all():
        worst = scale.flatten()[off.argmax()]
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"the scale {worst.item():.3g} of {of} is outside what {name} can hold; export with dtype bf16 or fp32"
        )
    return held


def _weight(layer: Linear, path: str) -> QuantizedTensor:
    """The codes that the layer multiplies in evaluation."""
    spec = layer.recipe.output.b
    held = layer.held_weight()
    if held is None:
        made = cast_operand(layer.weight.detach(), spec, _tap(layer).of(WEIGHT))
        assert isinstance(made, QuantizedTensor), "a layer in high precision is exported as it is"
        held = made
    if held.format != E4M3 or not isinstance(held.granularity, GRANULARITIES):
        raise ConfigError(
            f"layer {path!r} has a weight in {held.format}, {held.granularity}; an ONNX graph takes E4M3 with a scale "
            "a tensor or a row: convert it with tensorwise, rowwise, static or weight_only"
        )
    return held


def _input_cast(layer: Linear, dtype: torch.dtype, path: str) -> tuple[nn.Module, str]:
    """How the layer's input is cast, and what to call it."""
    spec = layer.recipe.output.a
    if spec is None:
        return PlainInput(), HIGH_PRECISION
    rounding = (ScaleRounding.FP32, ScaleRounding.RCEIL)
    if spec.format != E4M3 or not isinstance(spec.granularity, GRANULARITIES) or spec.scale_rounding not in rounding:
        raise ConfigError(
            f"layer {path!r} casts its input to {spec.format}, {spec.granularity}, scales {spec.scale_rounding}; an "
            "ONNX graph takes E4M3 with a scale a tensor or a row, fp32 or rceil: convert it with tensorwise, rowwise "
            "or static"
        )
    encode = _constant_encode_scale(layer, spec, path)
    if encode is None:
        return DynamicCast(spec, dtype), "dynamic per row" if isinstance(spec.granularity, PerRow) else "dynamic"
    scale = layer.input_scale.detach().clone() if spec.scaling == Scaling.STATIC else encode.reciprocal()
    return StaticCast(encode, narrowed_scale(scale, dtype, f"the input of {path!r}")), "static"


def _constant_encode_scale(layer: Linear, spec: CastSpec, path: str) -> Tensor | None:
    """Of a calibrated input, or of one whose history has an amax; None where each tensor is measured."""
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
    """What an evaluation takes from the layer's state."""
    return LayerScaling(amaxes=None if layer.amax_history is None else layer.amax_history.amax.clone())


def _is_zero(weight: QuantizedTensor) -> Tensor:
    """Which of the weight's scales belong to codes that are all zero."""
    zero = weight.data.float() == 0
    return zero.all(dim=1) if isinstance(weight.granularity, PerRow) else zero.all()

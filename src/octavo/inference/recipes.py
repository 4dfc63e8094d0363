"""Serving recipes: format of a served model's weights, and cast of their inputs.

| recipe       | weights                     | inputs of the layers' linears                                    |
|--------------|-----------------------------|------------------------------------------------------------------|
| bf16         | BF16                        | FP32, not cast                                                   |
| int8         | INT8, a scale per row       | INT8, a scale per token (torchao's dynamic INT8)                 |
| fp8          | E4M3, a scale per row       | FP32, not cast                                                   |
| fp8-dynamic  | E4M3, a scale per row       | E4M3, a scale per token                                          |
| fp8-static   | E4M3, calibrated            | E4M3 with the calibration's scale; not cast without one          |

Weights that a file stores as codes with a scale per block keep those, and their inputs are cast per token and block in
fp8-dynamic. Routers of mixtures are FP32 in every recipe, and their inputs are not cast.

The head's weight has the same format as the others. Only ``int8`` casts the head's input: its rounding to E4M3 costs
about as much accuracy as that of all other inputs. One scale for all tokens of a call, as in the recipe ``tensorwise``,
is not supported: an answer would depend on concurrent requests.
"""

from collections.abc import Sequence
from enum import StrEnum

import torch
from torch import Tensor, nn

from octavo.errors import ConfigError
from octavo.formats import E4M3
from octavo.inference.decoder_weights import DecoderWeight, InputCast
from octavo.kernels import quantize
from octavo.nn import Linear
from octavo.numerics import PerBlock, PerRow, QuantizedTensor
from octavo.numerics.integers import Int8Rows, quantize_int8
from octavo.numerics.quantized import rows_of_scales
from octavo.recipes import Scaling

__all__ = ["ServingRecipe", "decoder_weight", "has_static_scales"]


class ServingRecipe(StrEnum):
    """Recipe of the table above."""

    BF16 = "bf16"
    INT8 = "int8"
    FP8 = "fp8"
    FP8_DYNAMIC = "fp8-dynamic"
    FP8_STATIC = "fp8-static"


def decoder_weight(recipe: ServingRecipe, *linears: nn.Linear, is_head: bool = False) -> DecoderWeight:
    """Concatenate the weights of layers with the same input and quantize them; FP8 codes are not quantized again.

    Args:
        recipe: format of the weight.
        linears: layers, in the order of their rows.
        is_head: whether this is the model's head.

    Raises:
        ConfigError: layers of different widths, codes that the recipe does not support, different static scales, or
            static scales of weights in blocks.
    """
    if len({linear.in_features for linear in linears}) > 1:
        raise ConfigError(f"layers that share an input must have the same in_features, unlike {linears}")
    bias = _bias(linears)
    if recipe is ServingRecipe.BF16:
        weight = torch.cat([_hp_weight(linear, recipe) for linear in linears]).bfloat16()
        return DecoderWeight(rows=weight, bias=bias)
    if recipe is ServingRecipe.INT8:
        integers = [quantize_int8(_hp_weight(linear, recipe)) for linear in linears]
        joined = Int8Rows(torch.cat([x.data for x in integers]), torch.cat([x.scale for x in integers]))
        return DecoderWeight(rows=joined, bias=bias, input=InputCast.INT8_DYNAMIC)
    codes = _concatenate([_weight_codes(linear) for linear in linears])
    if recipe is ServingRecipe.FP8_STATIC and (scale := _input_scale(linears)) is not None:
        if isinstance(codes.granularity, PerBlock):
            raise ConfigError(f"{recipe} does not read weights in blocks with static inputs; serve this model as fp8")
        return DecoderWeight(rows=codes, bias=bias, input=InputCast.E4M3_STATIC, input_scale=scale)
    dynamic = recipe is ServingRecipe.FP8_DYNAMIC and not is_head
    return DecoderWeight(rows=codes, bias=bias, input=InputCast.E4M3_DYNAMIC if dynamic else InputCast.NONE)


def _hp_weight(linear: nn.Linear, recipe: ServingRecipe) -> Tensor:
    if isinstance(linear, Linear) and linear.codes_layout is not None:
        raise ConfigError(f"this model's weights are FP8 codes, which {recipe} would round again; use fp8")
    return linear.weight.detach().float()


def _bias(linears: Sequence[nn.Linear]) -> Tensor | None:
    """Bias of all rows, with zeros for layers without one; None if no layer has one."""
    biases: list[Tensor | None] = [linear.bias for linear in linears]
    if not any(bias is not None for bias in biases):
        return None
    parts = [
        torch.zeros(linear.out_features, device=linear.weight.device) if bias is None else bias.detach().float()
        for linear, bias in zip(linears, biases, strict=True)
    ]
    return torch.cat(parts)


def _concatenate(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
    blocks = {part.granularity.columns for part in parts if isinstance(part.granularity, PerBlock)}
    if len(blocks) > 1:
        raise ConfigError(
            f"layers that share an input must have blocks of one width, not {sorted(blocks)}; convert again"
        )
    granularity = PerBlock(1, *blocks) if blocks else PerRow()
    scales = [
        part.scale.expand(granularity.scale_shape(part.shape)) for part in parts
    ]  # a row's, for all of its blocks
    data = torch.cat([part.data.view(torch.uint8) for part in parts]).view(parts[0].data.dtype)
    return QuantizedTensor(data, torch.cat(scales), granularity, torch.float32)


def _weight_codes(linear: nn.Linear) -> QuantizedTensor:
    held = linear.stored_codes() if isinstance(linear, Linear) else None
    if held is None:
        return quantize(linear.weight.detach().float(), E4M3, granularity=PerRow())
    if held.data.dtype != E4M3.torch_dtype:
        raise ConfigError(
            f"a runner takes E4M3 codes, and this weight is {held.data.dtype}; call octavo.restore(model) first"
        )
    if isinstance(held.granularity, PerBlock):
        return QuantizedTensor(held.data, rows_of_scales(held), PerBlock(1, held.granularity.columns), torch.float32)
    return QuantizedTensor(held.data, rows_of_scales(held).expand(held.shape[0], 1), PerRow(), torch.float32)


def _input_scale(linears: Sequence[nn.Linear]) -> Tensor | None:
    """Calibrated scale that all layers share; None if no layer has one."""
    scales = [
        float(layer.input_scale) if isinstance(layer, Linear) and _is_static(layer) else None for layer in linears
    ]
    if len({*scales}) > 1:
        raise ConfigError(f"layers that share an input must have the same static scale, not {scales}; calibrate again")
    return None if scales[0] is None else torch.tensor(scales[0])


def has_static_scales(model: nn.Module) -> bool:
    """Return True if some layer of the model has a static scale for its input."""
    return any(_is_static(layer) for layer in model.modules())


def _is_static(layer: nn.Module) -> bool:
    cast = layer.recipe.output.a if isinstance(layer, Linear) else None
    return cast is not None and cast.scaling is Scaling.STATIC

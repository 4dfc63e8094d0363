"""What a served model's weights are held as, and what their inputs are cast to.

| recipe       | weights                     | inputs of the layers' linears                                    |
|--------------|-----------------------------|------------------------------------------------------------------|
| bf16         | BF16                        | as they are                                                      |
| int8         | INT8, a scale a row         | INT8, a scale a token (torchao's dynamic INT8)                   |
| fp8          | E4M3, a scale a row         | as they are                                                      |
| fp8-dynamic  | E4M3, a scale a row         | E4M3, a scale a token                                            |
| fp8-static   | E4M3 as a calibration says  | E4M3 with the calibration's scale; as they are where it has none |

Inputs "as they are" are FP32 on a CPU. The head's weight is held as the others are; its input is cast by ``int8``
alone, since the rounding of that one input to E4M3 costs about as much as that of all others. One scale for all tokens
of a call, as the recipe ``tensorwise`` has it, is not there: an answer would depend on what else is served.
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
from octavo.recipes import Scaling

__all__ = ["ServingRecipe", "has_static_scales", "held_weight"]


class ServingRecipe(StrEnum):
    """One of the table above."""

    BF16 = "bf16"
    INT8 = "int8"
    FP8 = "fp8"
    FP8_DYNAMIC = "fp8-dynamic"
    FP8_STATIC = "fp8-static"


def held_weight(recipe: ServingRecipe, *linears: nn.Linear, is_head: bool = False) -> DecoderWeight:
    """Layers that read the same input as one product; codes that are held stay as they are.

    Args:
        recipe: how.
        linears: their rows come below each other.
        is_head: whether this is a model's head.

    Raises:
        ConfigError: layers of different widths, codes that the recipe cannot hold, or static scales that differ.
    """
    if len({linear.in_features for linear in linears}) > 1:
        raise ConfigError(f"layers side by side read the same tensor, and these read others: {linears}")
    bias = _bias(linears)
    if recipe is ServingRecipe.BF16:
        numbers = torch.cat([_plain(linear, recipe) for linear in linears]).bfloat16()
        return DecoderWeight(rows=numbers, bias=bias)
    if recipe is ServingRecipe.INT8:
        integers = [quantize_int8(_plain(linear, recipe)) for linear in linears]
        joined = Int8Rows(torch.cat([own.data for own in integers]), torch.cat([own.scale for own in integers]))
        return DecoderWeight(rows=joined, bias=bias, input=InputCast.INT8_DYNAMIC)
    codes = _codes([_codes_of(linear) for linear in linears])
    if recipe is ServingRecipe.FP8_STATIC and (scale := _input_scale(linears)) is not None:
        return DecoderWeight(rows=codes, bias=bias, input=InputCast.E4M3_STATIC, input_scale=scale)
    dynamic = recipe is ServingRecipe.FP8_DYNAMIC and not is_head
    return DecoderWeight(rows=codes, bias=bias, input=InputCast.E4M3_DYNAMIC if dynamic else InputCast.NONE)


def _plain(linear: nn.Linear, recipe: ServingRecipe) -> Tensor:
    if isinstance(linear, Linear) and linear.held is not None:
        raise ConfigError(
            f"this model's weights are FP8 codes already, and {recipe} would round them once more; use fp8"
        )
    return linear.weight.detach().float()


def _bias(linears: Sequence[nn.Linear]) -> Tensor | None:
    """Of all rows, zeros where a layer has none."""
    biases: list[Tensor | None] = [linear.bias for linear in linears]
    if not any(bias is not None for bias in biases):
        return None
    whole = [
        torch.zeros(linear.out_features, device=linear.weight.device) if bias is None else bias.detach().float()
        for linear, bias in zip(linears, biases, strict=True)
    ]
    return torch.cat(whole)


def _codes(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
    data = torch.cat([part.data.view(torch.uint8) for part in parts]).view(parts[0].data.dtype)
    return QuantizedTensor(data, torch.cat([part.scale for part in parts]), PerRow(), torch.float32)


def _codes_of(linear: nn.Linear) -> QuantizedTensor:
    held = linear.held_weight() if isinstance(linear, Linear) else None
    if held is None:
        return quantize(linear.weight.detach().float(), E4M3, granularity=PerRow())
    if held.data.dtype != E4M3.torch_dtype or isinstance(held.granularity, PerBlock):
        raise ConfigError(
            f"a runner reads E4M3 codes with a scale a row or one for all, and this weight is held as "
            f"{held.data.dtype} {held.granularity}; octavo.restore(model) first"
        )
    scale = held.scale.float().reshape(-1, 1).expand(held.shape[0], 1)
    return QuantizedTensor(held.data, scale, PerRow(), torch.float32)


def _input_scale(linears: Sequence[nn.Linear]) -> Tensor | None:
    """The one that all of them were calibrated to; None where none was."""
    scales = [
        float(layer.input_scale) if isinstance(layer, Linear) and _is_static(layer) else None for layer in linears
    ]
    if len({*scales}) > 1:
        raise ConfigError(
            f"layers that read the same tensor have the static scales {scales}, and one is needed; calibrate again"
        )
    return None if scales[0] is None else torch.tensor(scales[0])


def has_static_scales(model: nn.Module) -> bool:
    """Whether some layer of a model has a static scale for its input."""
    return any(_is_static(layer) for layer in model.modules())


def _is_static(layer: nn.Module) -> bool:
    cast = layer.recipe.output.a if isinstance(layer, Linear) else None
    return cast is not None and cast.scaling is Scaling.STATIC

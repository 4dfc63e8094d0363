"""What a checkpoint holds of a model: layers in FP8, every other tensor, and scales of keys and values."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from octavo.errors import ConfigError
from octavo.functional import cast_operand
from octavo.interchange.tables import CodedTable
from octavo.nn import Linear
from octavo.numerics import QuantizedTensor
from octavo.recipes import Recipe, Scaling

__all__ = ["Contents", "FP8Layer", "KVScales", "attention_path", "contents_of", "nothing_in_fp8"]

KVScales = tuple[Tensor | float, Tensor | float]  # of keys, of values
CONVOLUTIONS = (nn.Conv1d, nn.ConvTranspose1d)
LAYER = "model.layers.{}.self_attn"
ATTENTION = re.compile(r"model\.layers\.\d+\.self_attn")


@dataclass(frozen=True, slots=True, kw_only=True)
class FP8Layer:
    """A linear layer whose weight is written as codes.

    Attributes:
        recipe: what the layer runs.
        weight: codes [N, K] and their scale.
        input_scale: float32 [], of a static input; None where the input is not static.
    """

    recipe: Recipe
    weight: QuantizedTensor
    input_scale: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A model, taken apart.

    Attributes:
        layers: in FP8, by path, in the model's order.
        rest: every other tensor under its name in the ``state_dict``; of tied ones the first alone.
        tables: embeddings whose rows are codes, by path.
        left_out: paths of linear layers that stay in high precision.
        kv_scales: float32 [] of keys and of values, by decoder layer.
        experts: names of tensors that hold the matrices of all experts at once, in high precision.
    """

    layers: Mapping[str, FP8Layer]
    rest: Mapping[str, Tensor]
    left_out: tuple[str, ...]
    kv_scales: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    experts: tuple[str, ...] = ()
    tables: Mapping[str, CodedTable] = field(default_factory=dict)


def contents_of(
    model: nn.Module,
    kv_scales: Mapping[int, KVScales] | None = None,
    tables: Mapping[str, CodedTable] | None = None,
) -> Contents:
    """Take a converted model apart; codes that it holds stay as they are, other weights are cast as its recipes say.

    ``tables`` are those whose decoded rows the model has as embeddings.

    Raises:
        ConfigError: no layer is in FP8, one that is shares its weight with another module, a static input has no scale
            yet, the scales of keys and values are not a pair of positive numbers for each layer of a Llama, or a table
            is not the model's.
    """
    linears = {path: layer for path, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    owners = _owners(model)
    layers = {path: _taken(path, layer, owners) for path, layer in linears.items() if _is_fp8(layer)}
    if not layers:
        raise ConfigError(nothing_in_fp8(model))
    tables = tables or {}
    _check_tables(model, tables)
    return Contents(
        layers=layers,
        rest={name: tensor for name, tensor in _rest(model, layers) if name.removesuffix(".weight") not in tables},
        tables=tables,
        left_out=tuple(path for path in linears if path not in layers),
        kv_scales=_checked_kv_scales(model, kv_scales or {}),
        experts=tuple(_experts(model)),
    )


def nothing_in_fp8(model: nn.Module) -> str:
    """Why there is nothing to write, and what to do, for users of Python and of the command line."""
    linears = sum(isinstance(layer, nn.Linear) for layer in model.modules())
    return (
        f"no layer of this model is in FP8: each of its {linears} linear layers is the head, is skipped, or has a "
        "recipe in high precision, or none was converted (GPT-2's Conv1D is no nn.Linear); choose a recipe and "
        "what to skip (--recipe, --skip, --head) or octavo.convert(model, recipe) first"
    )


def _check_tables(model: nn.Module, tables: Mapping[str, CodedTable]) -> None:
    for path, table in tables.items():
        weight = dict(model.named_parameters()).get(f"{path}.weight")
        if weight is None or not torch.equal(weight.detach(), table.decoded().to(weight)):
            raise ConfigError(f"the rows of {path!r} are not what its codes decode to; apply the mix to it first")


def attention_path(model: nn.Module, index: int) -> str:
    """Where the attention of a decoder layer is.

    Raises:
        ConfigError: not where a Llama's is, and so no format says where its scales belong.
    """
    path = LAYER.format(index)
    if path not in dict(model.named_modules()):
        raise ConfigError(
            f"this model has no {path!r}, which the scales of keys and values are named after; calibrate it without "
            "them"
        )
    return path


def _checked_kv_scales(model: nn.Module, given: Mapping[int, KVScales]) -> dict[int, tuple[Tensor, Tensor]]:
    paths = dict(model.named_modules())
    for index in given:
        attention_path(model, index)
    for index in range(sum(ATTENTION.fullmatch(path) is not None for path in paths) if given else 0):
        if index not in given:
            raise ConfigError(f"layer {index} has no scales of keys and values; give them of every layer, or of none")
    return {index: _checked_pair(index, pair) for index, pair in given.items()}


def _checked_pair(index: int, given: object) -> tuple[Tensor, Tensor]:
    """A layer's scales in FP32."""
    found = [_as_fp32(each) for each in given] if isinstance(given, tuple | list) else []
    pair = [scale for scale in found if scale is not None and scale.numel() == 1 and scale.isfinite() and scale > 0]
    if len(pair) != 2 or len(found) != 2:
        raise ConfigError(
            f"the scales of keys and values of layer {index} are {given}; give a pair, each one positive, finite "
            "number in FP32's range"
        )
    return pair[0].reshape(()), pair[1].reshape(())


def _as_fp32(given: object) -> Tensor | None:
    """A number, or a tensor of floating numbers; None of anything else."""
    if isinstance(given, Tensor):
        return given.detach().float() if given.is_floating_point() else None
    return torch.tensor(given, dtype=torch.float32) if type(given) in (int, float) else None


def _experts(model: nn.Module) -> Iterator[str]:
    """Transformers keeps them as parameters of three dimensions, as only a convolution's are otherwise."""
    for path, module in model.named_modules():
        if not isinstance(module, CONVOLUTIONS):
            for name, parameter in module.named_parameters(path, recurse=False):
                if parameter.ndim == 3 and parameter.shape[0] > 1:
                    yield name


def _is_fp8(layer: nn.Linear) -> bool:
    return isinstance(layer, Linear) and not (layer.recipe.is_high_precision and layer.held is None)


def _owners(model: nn.Module) -> dict[int, int]:
    """How many modules have each parameter."""
    count: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            count[id(parameter)] = count.get(id(parameter), 0) + 1
    return count


def _taken(path: str, layer: nn.Linear, owners: Mapping[int, int]) -> FP8Layer:
    assert isinstance(layer, Linear)
    if owners[id(layer.stored_weight)] > 1:
        raise ConfigError(
            f"layer {path!r} is in FP8 and shares its weight with another module, which a checkpoint would tear apart; "
            f"convert the model without that layer: leave out convert_head (--head), or skip {path!r} (--skip)"
        )
    scale = layer.input_scale.detach().clone() if layer.recipe.has_static_input else None
    if scale is not None and not scale > 0:
        raise ConfigError(f"layer {path!r} has no scale for its static input; calibrate the model first")
    return FP8Layer(recipe=layer.recipe, weight=layer.held_weight() or _codes(layer), input_scale=scale)


def _codes(layer: Linear) -> QuantizedTensor:
    spec = layer.recipe.output.b
    assert spec is not None
    codes = cast_operand(layer.weight.detach(), replace(spec, scaling=Scaling.DYNAMIC))
    assert isinstance(codes, QuantizedTensor)
    return codes


def _rest(model: nn.Module, layers: Mapping[str, FP8Layer]) -> Iterator[tuple[str, Tensor]]:
    own = {f"{path}.{name}" for path in layers for name in ("weight", "weight_codes", "weight_scale")}
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in model.state_dict().items():
        identity = (tensor.data_ptr(), tensor.shape)
        if name in own or (identity in seen and tensor.numel()):
            continue
        seen.add(identity)
        yield name, tensor

"""Contents of an FP8 checkpoint: quantized layers, all other tensors, and scales of keys and values."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from octavo.checkpoints.tables import CodedTable
from octavo.convert import TensorNames, UnfusedExperts, routers
from octavo.errors import ConfigError
from octavo.functional import quantize_operand
from octavo.nn import Linear
from octavo.nn.fp8_weight import runs_in_fp8
from octavo.numerics import QuantizedTensor
from octavo.numerics.fnuz import to_fnuz
from octavo.recipes import Recipe

__all__ = ["Contents", "FP8Layer", "KVScales", "attention_path", "contents_of", "nothing_in_fp8"]

KVScales = tuple[Tensor | float, Tensor | float]  # of keys, of values
CONVOLUTIONS = (nn.Conv1d, nn.ConvTranspose1d)
LAYER = "model.layers.{}.self_attn"
ATTENTION = re.compile(r"model\.layers\.\d+\.self_attn")


@dataclass(frozen=True, slots=True, kw_only=True)
class FP8Layer:
    """Linear layer whose weight is stored as codes.

    Attributes:
        recipe: recipe of the layer.
        weight: codes [N, K] and their scale.
        input_scale: float32 [], for a static input; None otherwise.
    """

    recipe: Recipe
    weight: QuantizedTensor
    input_scale: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Tensors of a checkpoint.

    Attributes:
        layers: FP8 layers by path, in the model's order.
        rest: every other tensor by its name in the ``state_dict``; tied tensors under their first name only.
        tables: embeddings stored as rows of codes, by path.
        left_out: paths of linear layers and routers that stay in high precision; renamed, under both names.
        kv_scales: scales of keys and of values, float32 [] each, by decoder layer.
        experts: names of high-precision tensors that contain the matrices of all experts.
        unfused: paths of the linear layers of experts that have them, in FP8 or not.
    """

    layers: Mapping[str, FP8Layer]
    rest: Mapping[str, Tensor]
    left_out: tuple[str, ...]
    kv_scales: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    experts: tuple[str, ...] = ()
    tables: Mapping[str, CodedTable] = field(default_factory=dict)
    unfused: tuple[str, ...] = ()

    def renamed(self, names: TensorNames) -> "Contents":
        """The same contents under other names.

        What stays in high precision keeps its own name beside the other, for programs that match a configuration with
        their modules, as transformers does. Experts have no module of that name there.
        """
        return replace(
            self,
            layers={names.path(path): layer for path, layer in self.layers.items()},
            rest={names.tensor(name): tensor for name, tensor in self.rest.items()},
            left_out=tuple(dict.fromkeys([*map(names.path, self.left_out), *self._modules_left_out()])),
            unfused=tuple(map(names.path, self.unfused)),
        )

    def _modules_left_out(self) -> Iterator[str]:
        unfused = set(self.unfused)
        return (path for path in self.left_out if path not in unfused)

    def in_fnuz(self) -> "Contents":
        """The same values as FNUZ codes, with every scale doubled: of weights, static inputs, keys and values.

        Raises:
            ConfigError: a layer has a value that FNUZ codes cannot express.
        """
        return replace(
            self,
            layers={path: _in_fnuz(path, layer) for path, layer in self.layers.items()},
            kv_scales={index: (key * 2, value * 2) for index, (key, value) in self.kv_scales.items()},
        )


def _in_fnuz(path: str, layer: FP8Layer) -> FP8Layer:
    converted = to_fnuz(layer.weight)
    if converted.changed:
        raise ConfigError(
            f"{converted.changed} weights of layer {path!r} are infinite, or have a scale that cannot be doubled, and "
            "FNUZ codes cannot express them; write OCP codes"
        )
    scale = layer.input_scale
    return replace(layer, weight=converted.tensor, input_scale=None if scale is None else scale * 2)


def contents_of(
    model: nn.Module,
    kv_scales: Mapping[int, KVScales] | None = None,
    tables: Mapping[str, CodedTable] | None = None,
) -> Contents:
    """Collect the contents of a converted model; stored codes are kept, other weights are cast by their recipes.

    ``tables`` must decode to the model's embeddings.

    Raises:
        ConfigError: no layer is in FP8, an FP8 layer shares its weight with another module, a static input has no
            scale, the scales of keys and values are not a pair of positive numbers for each layer of a Llama, or a
            table does not match the model.
    """
    linears = {path: layer for path, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    owners = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    layers = {path: _fp8_layer(path, layer, owners) for path, layer in linears.items() if runs_in_fp8(layer)}
    if not layers:
        raise ConfigError(nothing_in_fp8(model))
    tables = tables or {}
    _check_tables(model, tables)
    unfused = tuple(_unfused(model))
    choosing = [name.removesuffix(".weight") for name in (routers(model) if unfused else ())]
    return Contents(
        layers=layers,
        rest={name: tensor for name, tensor in _rest(model, layers) if name.removesuffix(".weight") not in tables},
        tables=tables,
        left_out=tuple(path for path in dict.fromkeys([*linears, *choosing]) if path not in layers),
        kv_scales=_check_kv_scales(model, kv_scales or {}),
        experts=tuple(_experts(model)),
        unfused=unfused,
    )


def nothing_in_fp8(model: nn.Module) -> str:
    """Error message for a model without FP8 layers, for Python and the command line."""
    linears = sum(isinstance(layer, nn.Linear) for layer in model.modules())
    return (
        f"no layer of this model is in FP8: each of its {linears} linear layers is the head, is skipped, or has a "
        "recipe in high precision, or none was converted (GPT-2's Conv1D is not an nn.Linear); choose a recipe and "
        "what to skip (--recipe, --skip, --head) or octavo.convert(model, recipe) first"
    )


def _check_tables(model: nn.Module, tables: Mapping[str, CodedTable]) -> None:
    for path, table in tables.items():
        weight = dict(model.named_parameters()).get(f"{path}.weight")
        if weight is None or not torch.equal(weight.detach(), table.decoded().to(weight)):
            raise ConfigError(f"the rows of {path!r} differ from its decoded codes; apply the mix to the model first")


def attention_path(model: nn.Module, index: int) -> str:
    """Path of a decoder layer's attention.

    Raises:
        ConfigError: the model does not have a Llama's paths, after which formats name the scales.
    """
    path = LAYER.format(index)
    if path not in dict(model.named_modules()):
        raise ConfigError(
            f"this model has no {path!r}, after which the scales of keys and values are named; calibrate it without "
            "them"
        )
    return path


def _check_kv_scales(model: nn.Module, kv_scales: Mapping[int, KVScales]) -> dict[int, tuple[Tensor, Tensor]]:
    paths = dict(model.named_modules())
    for index in kv_scales:
        attention_path(model, index)
    for index in range(sum(ATTENTION.fullmatch(path) is not None for path in paths) if kv_scales else 0):
        if index not in kv_scales:
            raise ConfigError(f"layer {index} has no scales of keys and values; give them for every layer, or for none")
    return {index: _check_scale_pair(index, pair) for index, pair in kv_scales.items()}


def _check_scale_pair(index: int, pair: object) -> tuple[Tensor, Tensor]:
    """Validate a layer's pair of scales; returns them in FP32."""
    values = [_as_fp32(each) for each in pair] if isinstance(pair, tuple | list) else []
    scales = [scale for scale in values if scale is not None and scale.numel() == 1 and scale.isfinite() and scale > 0]
    if len(scales) != 2 or len(values) != 2:
        raise ConfigError(
            f"the scales of keys and values of layer {index} are {scales}; give a pair, each one positive, finite "
            "number in FP32's range"
        )
    return scales[0].reshape(()), scales[1].reshape(())


def _as_fp32(value: object) -> Tensor | None:
    """Convert a number or a floating tensor to FP32; None for anything else."""
    if isinstance(value, Tensor):
        return value.detach().float() if value.is_floating_point() else None
    return torch.tensor(value, dtype=torch.float32) if type(value) in (int, float) else None


def _experts(model: nn.Module) -> Iterator[str]:
    """Names of expert weights: transformers' parameters of three dimensions outside convolutions."""
    for path, module in model.named_modules():
        if not isinstance(module, CONVOLUTIONS):
            for name, parameter in module.named_parameters(path, recurse=False):
                if parameter.ndim == 3 and parameter.shape[0] > 1:
                    yield name


def _unfused(model: nn.Module) -> Iterator[str]:
    """Paths of the linear layers of experts that have them."""
    for path, module in model.named_modules():
        if isinstance(module, UnfusedExperts):
            yield from (name for name, layer in module.named_modules(prefix=path) if isinstance(layer, nn.Linear))


def _fp8_layer(path: str, layer: Linear, owners: Mapping[int, int]) -> FP8Layer:
    if owners[id(layer.stored_weight)] > 1:
        raise ConfigError(
            f"layer {path!r} is in FP8 and shares its weight with another module, which a checkpoint would separate; "
            f"convert the model without that layer: leave out convert_head (--head), or skip {path!r} (--skip)"
        )
    scale = layer.input_scale.detach().clone() if layer.recipe.has_static_input else None
    if scale is not None and not scale > 0:
        raise ConfigError(f"layer {path!r} has no scale for its static input; calibrate the model first")
    return FP8Layer(recipe=layer.recipe, weight=layer.stored_codes() or _codes(layer), input_scale=scale)


def _codes(layer: Linear) -> QuantizedTensor:
    assert layer.recipe.output.b is not None
    return quantize_operand(layer.weight.detach(), layer.recipe.output.b)


def _rest(model: nn.Module, layers: Mapping[str, FP8Layer]) -> Iterator[tuple[str, Tensor]]:
    layer_tensors = {f"{path}.{name}" for path in layers for name in ("weight", "weight_codes", "weight_scale")}
    identities: set[tuple[int, torch.Size]] = set()
    for name, tensor in model.state_dict().items():
        identity = (tensor.data_ptr(), tensor.shape)
        if name in layer_tensors or (identity in identities and tensor.numel()):
            continue
        identities.add(identity)
        yield name, tensor

"""Loading of FP8 checkpoint folders (``octavo.load_quantized``), without changing any code but FNUZ ones.

A layer stored as codes becomes an ``octavo.nn.Linear`` that stores those codes and scales; all other tensors are
converted to FP32, which is exact. Every inconsistency is an error: a tensor that belongs to neither the model nor the
format, a scale of another shape, or a layer on which the configuration and the file disagree.

Weights in FNUZ codes become OCP codes with half the scale; static scales of inputs and of keys and values are halved
too (:mod:`octavo.numerics.fnuz`).

A Llama is loaded as octavo's own model, without transformers; other architectures need transformers. Experts that the
folder has one by one become linear layers of their own (:mod:`octavo.convert.unfused_experts`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from octavo.checkpoints.contents import attention_path
from octavo.checkpoints.file_format import FileFormat, Layout
from octavo.checkpoints.formats import CONFIG, read_configuration
from octavo.checkpoints.names import EXACT_IN_FP32, ScaleNames, checked_scale
from octavo.checkpoints.tables import CodedTable, table_names
from octavo.checkpoints.tensor_files import TensorFiles
from octavo.checksums import check_sums
from octavo.convert import UnfusedExperts, convert, file_names, guard_save_pretrained, unfuse_experts
from octavo.errors import CheckpointError, ConfigError
from octavo.formats import format_of
from octavo.models import Llama
from octavo.models.llama import skip_init
from octavo.models.llama_folder import read_tokenizer, shape_from_record
from octavo.models.sources import INSTALL
from octavo.nn import Linear
from octavo.nn.fp8_weight import store_codes
from octavo.numerics import PerTensor, QuantizedTensor
from octavo.numerics.fnuz import FNUZ_FORMATS, to_ocp
from octavo.recipes import Recipe

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["LoadedLayers", "QuantizedModel", "check_names", "load_layers", "load_quantized", "read_layout"]

EXPERT = re.compile(r"\.experts\.\d+\.")  # in a tensor's name
AGAIN = "export or download the folder again"
FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedModel:
    """Model loaded from an FP8 checkpoint.

    Attributes:
        model: in evaluation mode; its FP8 layers store the file's codes.
        tokenizer: of the folder.
        context: maximum number of tokens.
        format: name of the folder's format.
        dtype: narrowest dtype of the folder's floating tensors, excluding codes and scales.
        recipes: recipe of each FP8 layer, by path.
        kv_scales: scales of keys and of values, float32 [] each, by decoder layer, if the folder has them. The model
            itself does not cast keys and values.
        tables: embeddings stored as codes in the folder; the model holds the decoded rows.
        from_fnuz: layers that the folder stores as FNUZ codes: by path, the number of weights whose value is not in
            OCP's format and was rounded; 0 for most.
    """

    model: nn.Module
    tokenizer: "Tokenizer"
    context: int
    format: str
    dtype: torch.dtype
    recipes: Mapping[str, Recipe]
    kv_scales: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    tables: Mapping[str, CodedTable] = field(default_factory=dict)
    from_fnuz: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedLayers:
    """Result of :func:`load_layers`.

    Attributes:
        scales: names of the layers' scales in the folder.
        from_fnuz: as in :class:`QuantizedModel`.
    """

    scales: set[str] = field(default_factory=set)
    from_fnuz: dict[str, int] = field(default_factory=dict)


def load_quantized(folder: str | Path) -> QuantizedModel:
    """Load an FP8 checkpoint folder in one of the formats compressed-tensors, hf-fp8, modelopt and octavo.

    Args:
        folder: with config.json, safetensors and tokenizer.json.

    Raises:
        CheckpointError: a missing, truncated or damaged file, a mismatch with octavo.sha256, an unknown quant_method,
            missing or unknown tensors, or a scale that has another shape or is NaN, infinite, zero or negative.
        ConfigError: the architecture needs transformers, which is not installed.

    Example:
        >>> load_quantized("served/model").format  # doctest: +SKIP
        'compressed-tensors'
    """
    path = Path(folder)
    if not (path / CONFIG).is_file():
        raise CheckpointError(f"{str(folder)!r} holds no model: it has no {CONFIG}; name a folder that has one")
    check_sums(path)
    _, record, _ = read_configuration(path)
    files = TensorFiles(path)
    model = _empty_model(path, record, files)
    fmt, layout, files = read_layout(path, model)
    dtype = _dtype(files, {name for name in model.state_dict() if name in files} - _code_names(layout))
    tables = _tables(path, model, files, layout)
    with torch.no_grad():
        layers, kv_scales = _load(model, files, fmt, layout, tables)
    context = record.get("max_position_embeddings")
    if not isinstance(context, int) or isinstance(context, bool):
        raise CheckpointError(f"{CONFIG} in {str(folder)!r} needs an integer max_position_embeddings")
    return QuantizedModel(
        model=model.eval(),
        tokenizer=read_tokenizer(path),
        context=context,
        format=fmt.name,
        dtype=dtype,
        recipes=layout.recipes,
        kv_scales=kv_scales,
        tables=tables,
        from_fnuz=layers.from_fnuz,
    )


def read_layout(folder: Path, model: nn.Module) -> tuple[FileFormat, Layout, TensorFiles]:
    """Read which layers of an architecture a folder stores as codes, and check that its tensors agree.

    Args:
        folder: of the checkpoint.
        model: of the folder's architecture; its weights are not read and may be on the meta device. Experts that the
            folder has one by one get linear layers of their own.
    """
    fmt, _, config = read_configuration(folder)
    _unfuse_experts(folder, model)
    names = file_names(model)
    files = TensorFiles(folder, names.reversed().tensor)
    linears = {names.path(path): path for path, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    layout = fmt.layout(config, list(linears), folder)
    layout = replace(layout, recipes={linears[path]: recipe for path, recipe in layout.recipes.items()})
    _check_codes(folder, files, layout, list(linears.values()))
    return fmt, layout, files


def _empty_model(folder: Path, record: dict[str, Any], files: TensorFiles) -> nn.Module:
    """Model of the architecture in config.json, with uninitialised weights."""
    shape = shape_from_record(record)
    if shape is not None:
        with skip_init():
            return Llama(shape)
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(
            f"{str(folder)!r} is a {record.get('model_type')}, which needs transformers, which is not installed; "
            f"{INSTALL}"
        ) from error
    plain = {key: value for key, value in record.items() if key != "quantization_config"}
    try:
        config = AutoConfig.for_model(**plain)
        if (layers := getattr(config, "num_hidden_layers", 0)) > len(files.names):  # it would build for hours
            raise ValueError(f"{CONFIG} has {layers} layers, more than there are tensors, {len(files.names)}")
        with skip_init():
            auto: Any = AutoModelForCausalLM
            built: nn.Module = auto.from_config(config, dtype=torch.float32)
    except Exception as error:  # transformers raises arbitrary exceptions
        raise CheckpointError(f"transformers cannot build the model of {str(folder)!r}: {error}") from error
    return built


def _unfuse_experts(folder: Path, model: nn.Module) -> None:
    """Give experts linear layers of their own if the folder has them one by one; raise if the model cannot."""
    names = [name for name in TensorFiles(folder).names if EXPERT.search(name)]
    if names:
        unfuse_experts(model)
    if names and not any(isinstance(module, UnfusedExperts) for module in model.modules()):
        raise CheckpointError(
            f"{str(folder)!r} has experts one by one, {names[0]} and {len(names) - 1} more tensors, which this "
            f"{type(model).__name__} has not; octavo reads those that transformers names so"
        )


def _check_codes(folder: Path, files: TensorFiles, layout: Layout, linears: list[str]) -> None:
    """Raise unless exactly the FP8 layers of the configuration have codes as weights."""
    of_tables = {name for path in layout.tables for name in table_names(path)}
    coded = {name.removesuffix(".weight") for name in files.names if files.is_fp8(name) and name not in of_tables}
    if surplus := sorted(coded - layout.recipes.keys()):
        where = "no linear layer" if surplus[0] not in linears else "a layer in high precision by its configuration"
        raise CheckpointError(f"{surplus[0]}.weight in {str(folder)!r} is FP8 codes of {where}; {AGAIN}")
    if missing := sorted(layout.recipes.keys() - coded):
        what = "is not FP8 codes" if f"{missing[0]}.weight" in files else "is missing"
        raise CheckpointError(f"{missing[0]}.weight in {str(folder)!r} {what}, but its configuration lists it; {AGAIN}")


def _code_names(layout: Layout) -> set[str]:
    return {f"{path}.weight" for path in layout.recipes}


def _dtype(files: TensorFiles, names: set[str]) -> torch.dtype:
    """Common dtype of the floating tensors among ``names``; float32 if they differ."""
    dtypes = {FLOATS[kind] for name in names if (kind := files.kind(name)) in FLOATS}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def _tables(folder: Path, model: nn.Module, files: TensorFiles, layout: Layout) -> dict[str, CodedTable]:
    """Read the embeddings stored as codes."""
    state_dict, tables = model.state_dict(), dict[str, CodedTable]()
    for path in layout.tables:
        weight = state_dict.get(f"{path}.weight")
        if weight is None or weight.ndim != 2 or f"{path}.weight" in files:
            raise CheckpointError(
                f"{path!r} is not a table of codes in {str(folder)!r}, as its configuration states; {AGAIN}"
            )
        tables[path] = CodedTable.read(path, files, weight.shape)
    return tables


def _load(
    model: nn.Module, files: TensorFiles, fmt: FileFormat, layout: Layout, tables: Mapping[str, CodedTable]
) -> tuple[LoadedLayers, dict[int, tuple[Tensor, Tensor]]]:
    state_dict = model.state_dict()
    for path, table in tables.items():
        state_dict[f"{path}.weight"].copy_(table.decoded())
    used = _load_rest(state_dict, files, _code_names(layout), {f"{path}.weight" for path in tables})
    used |= {name for path in tables for name in table_names(path)}
    layers = load_layers(model, files, fmt, layout)
    used |= layers.scales
    kv_scales = dict[int, tuple[Tensor, Tensor]]()
    if layout.has_kv_scales:
        kv_scales, names = _kv_scales(model, files, fmt.names, halved=bool(layers.from_fnuz))
        used |= names
    check_names(files, used, fmt)
    return layers, kv_scales


def check_names(files: TensorFiles, used: set[str], fmt: FileFormat) -> None:
    """Raise CheckpointError if the folder has other tensors than those used."""
    if unknown := sorted(set(files.names) - used):
        raise CheckpointError(
            f"the folder has {unknown[0]} and {len(unknown) - 1} more tensors that are neither the model's nor "
            f"{fmt.name}'s; {AGAIN}"
        )


def load_layers(model: nn.Module, files: TensorFiles, fmt: FileFormat, layout: Layout) -> LoadedLayers:
    """Convert the FP8 layers of a model and store the folder's codes and scales."""
    loaded = LoadedLayers()
    for recipe in set(layout.recipes.values()):
        _convert(model, recipe, {path for path, each in layout.recipes.items() if each == recipe})
    for path, recipe in layout.recipes.items():
        _load_layer(model.get_submodule(path), path, recipe, files, fmt.names, loaded=loaded)
    guard_save_pretrained(model)
    return loaded


def _convert(model: nn.Module, recipe: Recipe, paths: set[str]) -> None:
    convert(model, recipe, layer_filter=lambda path, _: path in paths, convert_head=True)


def _load_rest(state_dict: Mapping[str, Tensor], files: TensorFiles, coded: set[str], filled: set[str]) -> set[str]:
    """Load all tensors that are not codes and not in ``filled``; returns the names found, including codes."""
    _check_tied(state_dict, files)
    loaded = {tensor.data_ptr() for name, tensor in state_dict.items() if name in files or name in filled}
    for name, tensor in state_dict.items():
        if name in filled:
            continue
        if name not in files:
            if name in coded or tensor.data_ptr() not in loaded:  # a tied tensor is stored once
                raise CheckpointError(f"the folder has no {name}; {AGAIN}")
            continue
        if files.shape(name) != tensor.shape:
            raise CheckpointError(
                f"{name} is {list(files.shape(name))} in the folder, and {list(tensor.shape)} by its {CONFIG}; {AGAIN}"
            )
        if name not in coded:
            tensor.copy_(_check_exact(name, files[name], tensor.dtype))
    return {name for name in state_dict if name in files}


def _check_tied(state_dict: Mapping[str, Tensor], files: TensorFiles) -> None:
    """Raise if tied names of the model have different tensors in the file."""
    first: dict[int, str] = {}
    for name in (name for name, tensor in state_dict.items() if name in files and tensor.numel()):
        other = first.setdefault(state_dict[name].data_ptr(), name)
        if other == name:
            continue
        tensor, first_tensor = files[name], files[other]
        if tensor.dtype != first_tensor.dtype or not torch.equal(tensor, first_tensor):
            raise CheckpointError(f"{name} and {other} are tied by its {CONFIG}, but differ in the file; {AGAIN}")


def _check_exact(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Check that a high-precision tensor is finite and converts to the model's dtype exactly."""
    if tensor.dtype not in (EXACT_IN_FP32 if dtype == torch.float32 else (dtype,)):
        raise CheckpointError(f"{name} is {tensor.dtype}, which is not exact in the model's {dtype}; {AGAIN}")
    if not tensor.isfinite().all():
        raise CheckpointError(f"{name} holds NaN or infinity; {AGAIN}")
    return tensor


def _load_layer(
    layer: nn.Module, path: str, recipe: Recipe, files: TensorFiles, names: ScaleNames, *, loaded: LoadedLayers
) -> None:
    """Load a layer's codes and scales."""
    assert isinstance(layer, Linear)
    spec = recipe.output.b
    assert spec is not None
    codes = files[f"{path}.weight"]
    is_fnuz = format_of(codes.dtype) == FNUZ_FORMATS.get(spec.format)
    if codes.dtype != spec.format.torch_dtype and not is_fnuz:
        raise CheckpointError(f"{path}.weight is {codes.dtype}, but its recipe has {spec.format}; {AGAIN}")
    if (codes.float()).isnan().any():
        raise CheckpointError(f"{path}.weight holds NaN; {AGAIN}")
    name = f"{path}.{names.weight}"
    scale = checked_scale(name, _require(files, name), spec.granularity, codes.shape, spec.scale_format)
    layer.weight.requires_grad_(False)
    weight = QuantizedTensor(codes, scale, spec.granularity, torch.float32)
    if is_fnuz:
        converted = to_ocp(weight)
        weight, loaded.from_fnuz[path] = converted.tensor, converted.changed
    store_codes(layer, weight)
    loaded.scales.add(name)
    if recipe.has_static_input:
        name = f"{path}.{names.input}"
        input_scale = checked_scale(name, _require(files, name), PerTensor(), torch.Size())
        layer.input_scale.copy_(input_scale / 2 if is_fnuz else input_scale)
        loaded.scales.add(name)


def _kv_scales(
    model: nn.Module, files: TensorFiles, names: ScaleNames, *, halved: bool
) -> tuple[dict[int, tuple[Tensor, Tensor]], set[str]]:
    kv_scales, used = dict[int, tuple[Tensor, Tensor]](), set[str]()
    for index in range(len(model.get_submodule("model.layers"))):  # type: ignore[arg-type]
        path = attention_path(model, index)
        key, value = f"{path}.{names.key}", f"{path}.{names.value}"
        pair = [checked_scale(name, _require(files, name), PerTensor(), torch.Size()) for name in (key, value)]
        kv_scales[index] = (pair[0] / 2, pair[1] / 2) if halved else (pair[0], pair[1])
        used |= {key, value}
    return kv_scales, used


def _require(files: TensorFiles, name: str) -> Tensor:
    if name not in files:
        raise CheckpointError(f"the folder has no {name}; {AGAIN}")
    return files[name]

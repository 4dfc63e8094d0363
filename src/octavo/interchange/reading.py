"""``octavo.load_quantized``: a folder of FP8 codes and scales as a model of octavo's layers, not a code changed.

A layer whose file holds codes becomes an ``octavo.nn.Linear`` that holds just those codes and scales; everything else
is widened to FP32, which is exact. Nothing falls through: a tensor that is neither the model's nor a scale of the
format's, a scale of another shape, a layer that the configuration and the file disagree about: each is an error.

A Llama becomes octavo's own, without transformers; any other architecture is transformers'.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from octavo.checksums import check_sums
from octavo.convert import convert, guard_save_pretrained
from octavo.errors import CheckpointError, ConfigError
from octavo.interchange.contents import attention_path
from octavo.interchange.file_format import FileFormat, Layout
from octavo.interchange.formats import CONFIG, read_configuration
from octavo.interchange.names import EXACT_IN_FP32, ScaleNames, checked_scale
from octavo.interchange.tables import CodedTable, table_names
from octavo.interchange.tensor_files import TensorFiles
from octavo.models import Llama
from octavo.models.llama import NothingDrawn
from octavo.models.llama_folder import read_tokenizer, shape_from_record
from octavo.nn import Linear
from octavo.nn.fp8_weight import hold_codes
from octavo.numerics import PerTensor, QuantizedTensor
from octavo.recipes import Recipe

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["QuantizedModel", "load_quantized"]

INSTALL = "pip install 'octavo[hf]'"
EXPERT = ".experts."  # in a tensor's name; shared experts are ordinary layers
AGAIN = "export or download the folder again"
FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedModel:
    """A model read from a folder in FP8.

    Attributes:
        model: in evaluation mode; its layers in FP8 hold the file's codes.
        tokenizer: of the folder.
        context: the most tokens that it reads at once.
        format: the name of the folder's format.
        dtype: the narrowest that holds every floating tensor of the folder that is neither codes nor a scale.
        recipes: what each layer in FP8 runs, by path.
        kv_scales: float32 [] of keys and of values by decoder layer, where the folder has them. The model itself keeps
            them in high precision.
        tables: of embeddings whose rows are codes in the folder; the model holds what they decode to.
    """

    model: nn.Module
    tokenizer: "Tokenizer"
    context: int
    format: str
    dtype: torch.dtype
    recipes: Mapping[str, Recipe]
    kv_scales: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    tables: Mapping[str, CodedTable] = field(default_factory=dict)


def load_quantized(folder: str | Path) -> QuantizedModel:
    """Read a folder that ``octavo export`` or somebody else's tool wrote: compressed-tensors, hf-fp8, modelopt, octavo.

    Args:
        folder: with config.json, safetensors and tokenizer.json.

    Raises:
        CheckpointError: a missing, truncated or damaged file, one that is not what octavo.sha256 says, an unknown
            quant_method, tensors that are missing or that the format does not have, a scale of another shape, or one
            that is NaN, infinite, zero or negative.
        ConfigError: the architecture is transformers', which is not installed.

    Example:
        >>> load_quantized("served/model").format  # doctest: +SKIP
        'compressed-tensors'
    """
    path = Path(folder)
    if not (path / CONFIG).is_file():
        raise CheckpointError(f"{str(folder)!r} holds no model: it has no {CONFIG}; name a folder that has one")
    check_sums(path)
    fmt, record, given = read_configuration(path)
    files = TensorFiles(path)
    _check_no_experts(path, files, fmt)
    model = _plain_model(path, record)
    linears = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    layout = fmt.layout(given, linears, path)
    _check_codes(path, files, layout, linears)
    dtype = _dtype(files, {name for name in model.state_dict() if name in files} - _coded(layout))
    tables = _tables(path, model, files, layout)
    with torch.no_grad():
        kv_scales = _load(model, files, fmt, layout, tables)
    context = record.get("max_position_embeddings")
    if not isinstance(context, int) or isinstance(context, bool):
        raise CheckpointError(f"{CONFIG} in {str(folder)!r} does not say how many tokens the model reads")
    return QuantizedModel(
        model=model.eval(),
        tokenizer=read_tokenizer(path),
        context=context,
        format=fmt.name,
        dtype=dtype,
        recipes=layout.recipes,
        kv_scales=kv_scales,
        tables=tables,
    )


def _plain_model(folder: Path, record: dict[str, Any]) -> nn.Module:
    """Of the architecture that config.json names, its weights not yet written."""
    shape = shape_from_record(record)
    if shape is not None:
        with NothingDrawn():
            return Llama(shape)
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(
            f"{str(folder)!r} is a {record.get('model_type')}, which transformers builds, and it is not installed; "
            f"{INSTALL}"
        ) from error
    plain = {key: value for key, value in record.items() if key != "quantization_config"}
    try:
        config = AutoConfig.for_model(**plain)
        with NothingDrawn():
            auto: Any = AutoModelForCausalLM
            built: nn.Module = auto.from_config(config, dtype=torch.float32)
    except Exception as error:  # transformers raises whatever it likes
        raise CheckpointError(f"transformers cannot build the model of {str(folder)!r}: {error}") from error
    return built


def _check_no_experts(folder: Path, files: TensorFiles, fmt: FileFormat) -> None:
    """Raise where a format of servers', which names every expert, holds some: transformers has one tensor of all."""
    found = [name for name in files.names if EXPERT in name]
    if found and fmt.schemes is not None:
        raise CheckpointError(
            f"{str(folder)!r} has experts, {found[0]} and {len(found) - 1} more tensors; octavo reads models without "
            "experts: serve this one with vLLM or SGLang, or read it in high precision"
        )


def _check_codes(folder: Path, files: TensorFiles, layout: Layout, linears: list[str]) -> None:
    """Raise unless the layers that are to be in FP8 are those whose weights are codes."""
    of_tables = {name for path in layout.tables for name in table_names(path)}
    coded = {name.removesuffix(".weight") for name in files.names if files.is_fp8(name) and name not in of_tables}
    if surplus := sorted(coded - layout.recipes.keys()):
        where = "no linear layer" if surplus[0] not in linears else "a layer in high precision by its configuration"
        raise CheckpointError(f"{surplus[0]}.weight in {str(folder)!r} is FP8 codes of {where}; {AGAIN}")
    if missing := sorted(layout.recipes.keys() - coded):
        what = "is no FP8 codes" if f"{missing[0]}.weight" in files else "is missing"
        raise CheckpointError(f"{missing[0]}.weight in {str(folder)!r} {what}, as its configuration has it; {AGAIN}")


def _coded(layout: Layout) -> set[str]:
    return {f"{path}.weight" for path in layout.recipes}


def _dtype(files: TensorFiles, names: set[str]) -> torch.dtype:
    """The one of all floating tensors of those names; float32, which holds every other, where they differ."""
    found = {FLOATS[kind] for name in names if (kind := files.kind(name)) in FLOATS}
    return found.pop() if len(found) == 1 else torch.float32


def _tables(folder: Path, model: nn.Module, files: TensorFiles, layout: Layout) -> dict[str, CodedTable]:
    """Of the embeddings whose rows are codes."""
    own, found = model.state_dict(), dict[str, CodedTable]()
    for path in layout.tables:
        weight = own.get(f"{path}.weight")
        if weight is None or weight.ndim != 2 or f"{path}.weight" in files:
            raise CheckpointError(
                f"{path!r} is no table of codes in {str(folder)!r}, as its configuration has it; {AGAIN}"
            )
        found[path] = CodedTable.read(path, files, weight.shape)
    return found


def _load(
    model: nn.Module, files: TensorFiles, fmt: FileFormat, layout: Layout, tables: Mapping[str, CodedTable]
) -> dict[int, tuple[Tensor, Tensor]]:
    own = model.state_dict()
    for path, table in tables.items():
        own[f"{path}.weight"].copy_(table.decoded())
    used = _load_rest(own, files, _coded(layout), {f"{path}.weight" for path in tables})
    used |= {name for path in tables for name in table_names(path)}
    for recipe in set(layout.recipes.values()):
        _convert(model, recipe, {path for path, each in layout.recipes.items() if each == recipe})
    for path, recipe in layout.recipes.items():
        used |= _load_layer(model.get_submodule(path), path, recipe, files, fmt.names)
    guard_save_pretrained(model)
    kv_scales = dict[int, tuple[Tensor, Tensor]]()
    if layout.has_kv_scales:
        kv_scales, names = _kv_scales(model, files, fmt.names)
        used |= names
    if unknown := sorted(set(files.names) - used):
        raise CheckpointError(
            f"the folder has {unknown[0]} and {len(unknown) - 1} more tensors that are neither the model's nor "
            f"{fmt.name}'s; {AGAIN}"
        )
    return kv_scales


def _convert(model: nn.Module, recipe: Recipe, paths: set[str]) -> None:
    convert(model, recipe, layer_filter=lambda path, _: path in paths, convert_head=True)


def _load_rest(own: Mapping[str, Tensor], files: TensorFiles, coded: set[str], filled: set[str]) -> set[str]:
    """Fill in everything that is no codes and not filled yet; returns the files' names of it, codes included."""
    _check_tied(own, files)
    written = {tensor.data_ptr() for name, tensor in own.items() if name in files or name in filled}
    for name, tensor in own.items():
        if name in filled:
            continue
        if name not in files:
            if name in coded or tensor.data_ptr() not in written:  # a tied tensor is written once
                raise CheckpointError(f"the folder has no {name}; {AGAIN}")
            continue
        if files.shape(name) != tensor.shape:
            raise CheckpointError(
                f"{name} is {list(files.shape(name))} in the folder, and {list(tensor.shape)} by its {CONFIG}; {AGAIN}"
            )
        if name not in coded:
            tensor.copy_(_checked(name, files[name], tensor.dtype))
    return {name for name in own if name in files}


def _check_tied(own: Mapping[str, Tensor], files: TensorFiles) -> None:
    """Raise where names of one tensor of the model have different tensors in the file."""
    first: dict[int, str] = {}
    for name in (name for name, tensor in own.items() if name in files and tensor.numel()):
        other = first.setdefault(own[name].data_ptr(), name)
        if other == name:
            continue
        here, there = files[name], files[other]
        if here.dtype != there.dtype or not torch.equal(here, there):
            raise CheckpointError(f"{name} and {other} are one tensor by its {CONFIG}, and differ in the file; {AGAIN}")


def _checked(name: str, given: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in high precision, which widens to the model's without a loss."""
    if given.dtype not in (EXACT_IN_FP32 if dtype == torch.float32 else (dtype,)):
        raise CheckpointError(f"{name} is {given.dtype}, which is not exact in the model's {dtype}; {AGAIN}")
    if not given.isfinite().all():
        raise CheckpointError(f"{name} holds NaN or infinity; {AGAIN}")
    return given


def _load_layer(layer: nn.Module, path: str, recipe: Recipe, files: TensorFiles, names: ScaleNames) -> set[str]:
    """Hand a layer its codes and scales; returns their names."""
    assert isinstance(layer, Linear)
    spec = recipe.output.b
    assert spec is not None
    codes = files[f"{path}.weight"]
    if codes.dtype != spec.format.torch_dtype:
        raise CheckpointError(f"{path}.weight is {codes.dtype}, and its recipe has {spec.format}; {AGAIN}")
    if (codes.float()).isnan().any():
        raise CheckpointError(f"{path}.weight holds NaN; {AGAIN}")
    name = f"{path}.{names.weight}"
    scale = checked_scale(name, _present(files, name), spec.granularity, codes.shape, spec.scale_format)
    layer.weight.requires_grad_(False)
    hold_codes(layer, QuantizedTensor(codes, scale, spec.granularity, torch.float32))
    used = {name}
    if recipe.has_static_input:
        name = f"{path}.{names.input}"
        layer.input_scale.copy_(checked_scale(name, _present(files, name), PerTensor(), torch.Size()))
        used.add(name)
    return used


def _kv_scales(
    model: nn.Module, files: TensorFiles, names: ScaleNames
) -> tuple[dict[int, tuple[Tensor, Tensor]], set[str]]:
    found, used = dict[int, tuple[Tensor, Tensor]](), set[str]()
    for index in range(len(model.get_submodule("model.layers"))):  # type: ignore[arg-type]
        path = attention_path(model, index)
        key, value = f"{path}.{names.key}", f"{path}.{names.value}"
        pair = [checked_scale(name, _present(files, name), PerTensor(), torch.Size()) for name in (key, value)]
        found[index] = pair[0], pair[1]
        used |= {key, value}
    return found, used


def _present(files: TensorFiles, name: str) -> Tensor:
    if name not in files:
        raise CheckpointError(f"the folder has no {name}; {AGAIN}")
    return files[name]

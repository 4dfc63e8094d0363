"""FP8 folders in transformers: ``AutoModelForCausalLM.from_pretrained(folder)``, with the codes kept as codes.

Importing ``octavo.compat.huggingface`` registers a quantizer for the quantization methods ``octavo`` and ``modelopt``.
transformers has quantizers of its own for the other methods that octavo writes, compressed-tensors and fp8;
``from_pretrained(folder, config=codes_config(folder))`` reads those folders by octavo's quantizer too.

transformers loads the tensors in high precision. The FP8 layers have no weight while it does; the quantizer then
converts them to ``octavo.nn.Linear`` and stores the file's codes and scales, as ``octavo.load_quantized`` does. No
weight is decoded on the way. Experts that the folder has one by one have a linear layer each
(:mod:`octavo.convert.unfused_experts`), since octavo stores codes in linear layers. transformers has no entry point for
quantizers, so the import is required.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.core_model_loading import MergeModulelist
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from octavo.checkpoints.file_format import FileFormat, Layout
from octavo.checkpoints.loading import load_layers, read_layout
from octavo.checkpoints.tables import CodedTable, table_names
from octavo.checkpoints.tensor_files import TensorFiles
from octavo.checksums import check_sums
from octavo.convert import UnfusedExperts
from octavo.errors import CheckpointError, ConfigError

__all__ = ["FolderConfig", "FolderQuantizationConfig", "FolderQuantizer", "codes_config", "register"]

OCTAVO, METHODS = "octavo", ("octavo", "modelopt")
SHARED_SCALES = r"\.(k_scale|v_scale)$"  # of keys and values, which the model does not cast


class FolderConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """Configuration of a folder in octavo's own format: reads as that of the model's own type."""

    model_type = OCTAVO

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        """Return the configuration of the model type in quantization_config.

        Raises:
            CheckpointError: transformers does not have that type.
        """
        kind = (config_dict.get("quantization_config") or {}).get("model_type")
        if not isinstance(kind, str) or kind == OCTAVO or kind not in CONFIG_MAPPING:
            raise CheckpointError(
                f"the folder's model_type is {kind!r}, which this transformers does not have; update transformers, or "
                "export the folder again"
            )
        return CONFIG_MAPPING[kind].from_dict({**config_dict, "model_type": kind}, **options)


class FolderQuantizationConfig(QuantizationConfigMixin):
    """``quantization_config`` of a folder that :class:`FolderQuantizer` reads, unchanged."""

    def __init__(self, quant_method: str, **entries: Any) -> None:
        self.quant_method = quant_method  # type: ignore[assignment]  # of another program than transformers
        vars(self).update(entries)


class FolderQuantizer(HfQuantizer):
    """Reads FP8 layers of a folder as ``octavo.nn.Linear`` with the file's codes and scales."""

    requires_calibration = True  # the model has to be quantized already

    def validate_environment(self, *args: Any, **options: Any) -> None:
        """Refuse devices that are not one device."""
        del args
        device_map = options.get("device_map")
        if isinstance(device_map, str) or (isinstance(device_map, dict) and len(set(device_map.values())) > 1):
            raise ConfigError(
                f"octavo's quantizer loads a model onto one device, not device_map={device_map!r}; pass one device, "
                "such as device_map={'': 'cuda:0'}, or none"
            )

    def _process_model_before_weight_loading(self, model: Any, **options: Any) -> Any:
        """Read the layout and remove the weights of the FP8 layers, which transformers would read as numbers."""
        files = options.get("checkpoint_files") or []
        if not files:
            raise ConfigError("octavo's quantizer reads the files of a folder; pass the folder, not a state_dict")
        self.folder = Path(files[0]).parent
        check_sums(self.folder)
        self.layout: Layout
        self.format: FileFormat
        self.files: TensorFiles
        with torch.device("cpu"):  # transformers builds the model in a context of the meta device
            self.format, self.layout, self.files = read_layout(self.folder, model)
        unfused = [module for module in model.modules() if isinstance(module, UnfusedExperts)]
        self.has_unfused_experts = bool(unfused)
        for experts in unfused:
            experts.activation._is_hf_initialized = True  # type: ignore[assignment]  # noqa: SLF001 (has no weights)
        for path in self.layout.recipes:
            layer = model.get_submodule(path)
            layer.register_parameter("weight", None)
            layer._is_hf_initialized = True  # noqa: SLF001 (transformers' mark: it draws no numbers)
        model._keys_to_ignore_on_load_unexpected |= {*map(_exactly, self._expected()), SHARED_SCALES}  # noqa: SLF001
        model._keys_to_ignore_on_load_missing |= {_exactly(f"{path}.weight") for path in self.layout.tables}  # noqa: SLF001
        return model

    def update_weight_conversions(self, weight_conversions: list[Any], *_: Any) -> list[Any]:
        """Leave out the conversions that stack experts' weights, where each expert has layers of its own."""
        return [each for each in weight_conversions if not (self.has_unfused_experts and _is_stacking(each))]

    def _expected(self) -> set[str]:
        names = {
            f"{path}.{each}"
            for path in self.layout.recipes
            for each in ("weight", self.format.names.weight, self.format.names.input)
        }
        return names | {name for path in self.layout.tables for name in table_names(path)}

    @torch.no_grad()
    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> Any:
        """Store codes, scales and tables; the model is then a converted model like any other."""
        del options
        for path in self.layout.tables:
            weight = model.get_submodule(path).weight
            weight.copy_(CodedTable.read(path, self.files, weight.shape).decoded())
        dtype, device = model.dtype, model.device
        for path in self.layout.recipes:
            _add_placeholder(model.get_submodule(path), device, dtype)
        load_layers(model, self.files, self.format, self.layout)
        for path in self.layout.recipes:
            layer = model.get_submodule(path)
            layer.to(device)
            layer.codes_layout = layer.codes_layout._replace(hp_dtype=dtype)
        self.remove_quantization_config(model)
        return model

    def remove_quantization_config(self, model: Any) -> None:
        """Remove what would describe the model as quantized by another library: it is a converted model."""
        del model.hf_quantizer, model.config.quantization_config, model.quantization_method
        model.is_quantized = False

    def is_serializable(self) -> bool:
        """Return False: ``octavo.save_quantized`` writes codes."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Return True: adapters train on top of the codes."""
        return True


def codes_config(folder: str | Path) -> PreTrainedConfig:
    """Configuration with which ``from_pretrained`` keeps a folder's codes, whatever the folder's method.

    Args:
        folder: in a format that ``octavo.load_quantized`` reads, such as compressed-tensors or hf-fp8.

    Raises:
        ConfigError: the folder has no codes.
    """
    config: PreTrainedConfig = AutoConfig.from_pretrained(folder)
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        raise ConfigError(f"{str(folder)!r} holds no FP8 codes; read it by from_pretrained without codes_config")
    entries = stored if isinstance(stored, dict) else stored.to_dict()
    config.quantization_config = {**entries, "quant_method": OCTAVO}
    return config


def _is_stacking(conversion: Any) -> bool:
    return any(isinstance(operation, MergeModulelist) for operation in getattr(conversion, "operations", ()))


def _exactly(name: str) -> str:
    return f"^{re.escape(name)}$"


def _add_placeholder(layer: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Add a weight of the layer's shape that takes one element of memory, until codes replace it."""
    shape = (layer.out_features, layer.in_features)
    empty = torch.zeros((), device=device, dtype=dtype).expand(shape)  # type: ignore[arg-type]
    layer.register_parameter("weight", nn.Parameter(empty, requires_grad=False))


def register() -> None:
    """Register the quantizer and the model type with transformers; a second call does nothing."""
    AutoConfig.register(OCTAVO, FolderConfig, exist_ok=True)
    for method in METHODS:
        if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
            register_quantization_config(method)(FolderQuantizationConfig)
            register_quantizer(method)(FolderQuantizer)

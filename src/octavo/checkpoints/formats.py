"""Checkpoint formats by name, and detection of a folder's format."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from octavo.checkpoints.compressed_tensors import COMPRESSED_TENSORS
from octavo.checkpoints.file_format import FileFormat, damaged
from octavo.checkpoints.hf_fp8 import HF_FP8
from octavo.checkpoints.modelopt import HF_QUANT_CONFIG, MODELOPT, configuration_from_file
from octavo.checkpoints.octavo_format import OCTAVO_FORMAT
from octavo.checkpoints.tensor_files import read_json
from octavo.errors import CheckpointError

__all__ = ["CONFIG", "FORMATS", "is_quantized", "plain_configuration", "read_configuration", "written_configuration"]

CONFIG, QUANTIZATION, MODEL_TYPE = "config.json", "quantization_config", "model_type"
FORMATS = MappingProxyType({fmt.name: fmt for fmt in (COMPRESSED_TENSORS, HF_FP8, MODELOPT, OCTAVO_FORMAT)})
METHODS = {fmt.quant_method: fmt for fmt in FORMATS.values()}


def is_quantized(folder: Path) -> bool:
    """Report whether a folder's config.json declares any quantization method, supported or not.

    Loading such a folder as a plain model would load codes as weights, so unknown methods count too.

    Raises:
        CheckpointError: config.json cannot be read.
    """
    return bool(_method(folder, read_json(folder / CONFIG)))


def read_configuration(folder: Path) -> tuple[FileFormat, dict[str, Any], dict[str, Any]]:
    """Return a folder's format, its config.json without quantization, and its quantization_config.

    Raises:
        CheckpointError: the configuration is missing, unreadable, or of an unsupported format.
    """
    record = read_json(folder / CONFIG)
    config = _method(folder, record)
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise CheckpointError(
            f"{str(folder)!r} has {method!r} as quant_method; octavo reads {', '.join(map(repr, METHODS))}"
            if config
            else f"{str(folder)!r} is not in FP8: its {CONFIG} has no {QUANTIZATION}; octavo export writes such folders"
        )
    return METHODS[method], plain_configuration(folder), config


def written_configuration(fmt: FileFormat, plain: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Combine the model's config.json with a format's quantization_config."""
    if fmt.model_type is None:
        return {**plain, QUANTIZATION: dict(config)}
    return {**plain, MODEL_TYPE: fmt.model_type, QUANTIZATION: {**config, MODEL_TYPE: plain.get(MODEL_TYPE)}}


def plain_configuration(folder: Path) -> dict[str, Any]:
    """config.json without quantization, as for the model in high precision.

    Raises:
        CheckpointError: config.json cannot be read.
    """
    record = read_json(folder / CONFIG)
    config = _method(folder, record)
    method = config.get("quant_method")
    fmt = METHODS.get(method) if isinstance(method, str) else None
    model_type = {} if fmt is None or fmt.model_type is None else {MODEL_TYPE: config.get(MODEL_TYPE)}
    return {key: value for key, value in record.items() if key != QUANTIZATION} | model_type


def _method(folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    config = record.get(QUANTIZATION)
    if config is not None:
        if not isinstance(config, Mapping) or not config:
            raise damaged("its value", config, "an object with a quant_method")
        return dict(config)
    if (folder / HF_QUANT_CONFIG).is_file():
        return configuration_from_file(read_json(folder / HF_QUANT_CONFIG))
    return {}

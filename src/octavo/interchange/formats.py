"""The formats by name, and which of them a folder is in."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from octavo.errors import CheckpointError
from octavo.interchange.compressed_tensors import COMPRESSED_TENSORS
from octavo.interchange.file_format import FileFormat, damaged
from octavo.interchange.hf_fp8 import HF_FP8
from octavo.interchange.modelopt import HF_QUANT_CONFIG, MODELOPT, configuration_from_file
from octavo.interchange.own import OWN
from octavo.interchange.tensor_files import read_json

__all__ = ["CONFIG", "FORMATS", "is_quantized", "plain_configuration", "read_configuration", "written_configuration"]

CONFIG, QUANTIZATION, MODEL_TYPE = "config.json", "quantization_config", "model_type"
FORMATS = MappingProxyType({fmt.name: fmt for fmt in (COMPRESSED_TENSORS, HF_FP8, MODELOPT, OWN)})
METHODS = {fmt.quant_method: fmt for fmt in FORMATS.values()}


def is_quantized(folder: Path) -> bool:
    """Whether a folder with a config.json says that it is quantized, be it in a format that octavo does not read.

    Whoever takes such a folder for a plain one takes codes for weights, so every method counts, unknown ones too.

    Raises:
        CheckpointError: its config.json cannot be read.
    """
    return bool(_method(folder, read_json(folder / CONFIG)))


def read_configuration(folder: Path) -> tuple[FileFormat, dict[str, Any], dict[str, Any]]:
    """The format of a folder, its config.json as of the model in high precision, and its quantization_config.

    Raises:
        CheckpointError: there is none, it cannot be read, or it is in no format that octavo reads.
    """
    record = read_json(folder / CONFIG)
    given = _method(folder, record)
    method = given.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise CheckpointError(
            f"{str(folder)!r} says {method!r} as quant_method; octavo reads {', '.join(map(repr, METHODS))}"
            if given
            else f"{str(folder)!r} is not in FP8: its {CONFIG} has no {QUANTIZATION}; octavo export writes such folders"
        )
    return METHODS[method], plain_configuration(folder), given


def written_configuration(fmt: FileFormat, plain: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """config.json in a format: of the model in high precision, and the quantization_config."""
    if fmt.model_type is None:
        return {**plain, QUANTIZATION: dict(given)}
    return {**plain, MODEL_TYPE: fmt.model_type, QUANTIZATION: {**given, MODEL_TYPE: plain.get(MODEL_TYPE)}}


def plain_configuration(folder: Path) -> dict[str, Any]:
    """config.json as the model in high precision has it, whatever the folder is in.

    Raises:
        CheckpointError: it cannot be read.
    """
    record = read_json(folder / CONFIG)
    given = _method(folder, record)
    method = given.get("quant_method")
    fmt = METHODS.get(method) if isinstance(method, str) else None
    own = {} if fmt is None or fmt.model_type is None else {MODEL_TYPE: given.get(MODEL_TYPE)}
    return {key: value for key, value in record.items() if key != QUANTIZATION} | own


def _method(folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    given = record.get(QUANTIZATION)
    if given is not None:
        if not isinstance(given, Mapping) or not given:
            raise damaged("what it holds", given, "an object with a quant_method")
        return dict(given)
    if (folder / HF_QUANT_CONFIG).is_file():
        return configuration_from_file(read_json(folder / HF_QUANT_CONFIG))
    return {}

"""Checkpoint formats of FP8 models: names and shapes, supported schemes, reading and writing."""

from octavo.checkpoints.contents import Contents, FP8Layer, KVScales, attention_path, contents_of
from octavo.checkpoints.file_format import FileFormat
from octavo.checkpoints.formats import (
    FORMATS,
    is_quantized,
    plain_configuration,
    read_configuration,
    written_configuration,
)
from octavo.checkpoints.loading import QuantizedModel, load_quantized
from octavo.checkpoints.tables import CodedTable
from octavo.checkpoints.tensor_files import check_no_codes

__all__ = [
    "FORMATS",
    "CodedTable",
    "Contents",
    "FP8Layer",
    "FileFormat",
    "KVScales",
    "QuantizedModel",
    "attention_path",
    "check_no_codes",
    "contents_of",
    "is_quantized",
    "load_quantized",
    "plain_configuration",
    "read_configuration",
    "written_configuration",
]

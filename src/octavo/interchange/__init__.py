"""Checkpoint formats of FP8 models: names and shapes, supported schemes, reading and writing."""

from octavo.interchange.contents import Contents, FP8Layer, KVScales, attention_path, contents_of
from octavo.interchange.file_format import FileFormat
from octavo.interchange.formats import (
    FORMATS,
    is_quantized,
    plain_configuration,
    read_configuration,
    written_configuration,
)
from octavo.interchange.reading import QuantizedModel, load_quantized
from octavo.interchange.tables import CodedTable
from octavo.interchange.tensor_files import check_no_codes

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

"""Export of FP8 ONNX graphs for TensorRT."""

from octavo.export.onnx.checks import EngineCheck
from octavo.export.onnx.export import OPSETS, OnnxOptions, check_packages, export_onnx
from octavo.export.onnx.layers import LayerNote
from octavo.export.onnx.lint import LintFault, lint
from octavo.export.onnx.report import OnnxReport
from octavo.export.onnx.tensorrt_rtx import BuildCheck

__all__ = [
    "OPSETS",
    "BuildCheck",
    "EngineCheck",
    "LayerNote",
    "LintFault",
    "OnnxOptions",
    "OnnxReport",
    "check_packages",
    "export_onnx",
    "lint",
]

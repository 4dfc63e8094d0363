"""Export of FP8 ONNX graphs for TensorRT."""

from octavo.onnx.checks import EngineCheck
from octavo.onnx.export import OPSETS, OnnxOptions, check_packages, export_onnx
from octavo.onnx.layers import LayerNote
from octavo.onnx.lint import LintFault, lint
from octavo.onnx.report import OnnxReport
from octavo.onnx.tensorrt_rtx import BuildCheck

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

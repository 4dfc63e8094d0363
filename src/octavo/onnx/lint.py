"""Static checks of an FP8 graph against TensorRT's rules.

| rule                 | requirement                                                                      |
|----------------------|----------------------------------------------------------------------------------|
| format               | codes are E4M3: TensorRT supports neither E5M2 nor FNUZ                          |
| cast                 | only QuantizeLinear casts to FP8                                                 |
| scale                | scales are constants, finite and above 0                                         |
| zero point           | is 0 or absent                                                                   |
| dtype                | a scale has the dtype of the high-precision tensor                               |
| weight               | constant codes are read only by DequantizeLinear, next to their product          |
| fp8 share            | at least one product has an FP8 weight, and the codes of each FP8 layer are read |
|                      | by a product                                                                     |

The graph is not run here, but in ``checks.py``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["GraphBytes", "LintFault", "graph_bytes", "lint"]

QUANTIZE, DEQUANTIZE, CAST = "QuantizeLinear", "DequantizeLinear", "Cast"
PRODUCTS = ("MatMul", "Gemm", "Conv")
PASSED_THROUGH = ("Transpose", "Reshape", "Identity", "Cast")  # between a weight and its product


@dataclass(frozen=True, slots=True, kw_only=True)
class LintFault:
    """Violation of a rule.

    Attributes:
        rule: a rule of the module's table.
        node: name of the node; "" for the whole graph.
        message: description of the violation.
    """

    rule: str
    node: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.node or 'the graph'}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBytes:
    """Bytes of a graph's constants.

    Attributes:
        codes: FP8 constants.
        total: all constants.
    """

    codes: int
    total: int

    @property
    def fp8_share(self) -> float:
        """Share of FP8 in the bytes; 0 for a graph without constants."""
        return self.codes / self.total if self.total else 0.0


class _GraphIndex:
    """A graph with inferred types, by onnx_ir."""

    def __init__(self, model: Any) -> None:
        import onnx_ir
        from onnx_ir.passes.common import ShapeInferencePass

        self.ir: Any = onnx_ir
        types = onnx_ir.DataType
        self.fp8: dict[Any, str] = {
            types.FLOAT8E4M3FN: "E4M3",
            types.FLOAT8E5M2: "E5M2",
            types.FLOAT8E4M3FNUZ: "E4M3_FNUZ",
            types.FLOAT8E5M2FNUZ: "E5M2_FNUZ",
        }
        graph_model = onnx_ir.from_proto(model)
        ShapeInferencePass(check_type=False, strict_mode=False, data_prop=False)(graph_model)
        graph = graph_model.graph
        self.nodes = list(graph)
        made = [value for node in self.nodes for value in node.outputs]
        self.values = dict.fromkeys([*graph.inputs, *graph.initializers.values(), *made])

    def constant(self, value: Any) -> Any:
        """Tensor of a constant; None for computed values."""
        return self.ir.convenience.get_const_tensor(value, propagate_shape_type=True)

    def number(self, value: Any) -> Any:
        """Values of a constant as float64; None for computed values."""
        tensor = self.constant(value)
        return None if tensor is None else tensor.numpy().astype(np.float64)


def lint(model: Any, *, weights: Mapping[str, Tensor] = MappingProxyType({})) -> tuple[LintFault, ...]:
    """Find all rule violations in an ONNX model.

    Args:
        model: ``onnx.ModelProto``, with its weights.
        weights: codes, E4M3 [K, N], that products must read, by layer path.

    Example:
        >>> import onnx
        >>> graph = onnx.parser.parse_model('''
        ...     <ir_version: 10, opset_import: ["" : 21]>
        ...     g (float[2] x) => (float8e5m2[2] y) { y = Cast<to = 19>(x) }
        ... ''')
        >>> [fault.rule for fault in lint(graph)]
        ['format', 'cast', 'fp8 share']
    """
    index = _GraphIndex(model)
    faults = list(_formats(index))
    for node in index.nodes:
        if node.op_type == CAST and node.outputs[0].dtype in index.fp8:
            faults.append(_fault("cast", node, "casts to FP8; TensorRT takes QuantizeLinear only"))
        if node.op_type in (QUANTIZE, DEQUANTIZE):
            faults += [*_scale(index, node), *_zero_point(index, node), *_dtype(node)]
    faults += _weights(index, weights)
    return tuple(faults)


def graph_bytes(model: Any) -> GraphBytes:
    """Count the FP8 and total bytes of an ONNX model's constants."""
    import onnx

    codes = total = 0
    for each in model.graph.initializer:
        size = onnx.numpy_helper.to_array(each).nbytes
        total += size
        codes += size if each.data_type == onnx.TensorProto.FLOAT8E4M3FN else 0
    return GraphBytes(codes=codes, total=total)


def _fault(rule: str, node: Any, message: str) -> LintFault:
    return LintFault(rule=rule, node=node.name or node.outputs[0].name, message=message)


def _formats(index: _GraphIndex) -> Iterator[LintFault]:
    for value in index.values:
        if index.fp8.get(value.dtype, "E4M3") != "E4M3":
            yield LintFault(rule="format", node=value.name, message=f"is {index.fp8[value.dtype]}; TensorRT reads E4M3")


def _scale(index: _GraphIndex, node: Any) -> Iterator[LintFault]:
    scale = index.number(node.inputs[1])
    if scale is None:
        yield _fault("scale", node, "is computed in the graph; TensorRT takes constants")
    elif not (np.isfinite(scale).all() and (scale > 0).all()):
        worst = scale.reshape(-1)[int(np.argmin(np.where(np.isfinite(scale), scale, -np.inf)))]
        yield _fault("scale", node, f"is {worst}; scales are finite and above 0")


def _zero_point(index: _GraphIndex, node: Any) -> Iterator[LintFault]:
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return
    zero = index.number(node.inputs[2])
    if zero is None or zero.any():
        yield _fault("zero point", node, "is not the constant 0")


def _dtype(node: Any) -> Iterator[LintFault]:
    plain = node.inputs[0] if node.op_type == QUANTIZE else node.outputs[0]
    scale, wide = node.inputs[1].dtype, plain.dtype
    if scale is not None and wide is not None and scale != wide:
        yield _fault("dtype", node, f"has a scale in {scale} and a tensor in {wide}")


def _weights(index: _GraphIndex, expected: Mapping[str, Tensor]) -> Iterator[LintFault]:
    """Check that FP8 constants go to DequantizeLinear, and that products read those of all layers."""
    for node in index.nodes:
        for value in filter(None, node.inputs):
            codes = index.constant(value) is not None and value.dtype in index.fp8
            if codes and node.op_type not in (DEQUANTIZE, QUANTIZE):
                yield _fault("weight", node, f"reads the codes {value.name!r} without decoding them")
    products = [node for node in index.nodes if node.op_type in PRODUCTS]
    codes_read = {value for node in products for value in _codes_read(index, node)}
    if not codes_read:
        yield LintFault(rule="fp8 share", node="", message="no product has a weight in FP8")
    digests = {_digest(index.constant(value).numpy()) for value in codes_read}
    for path, layer_codes in expected.items():
        if _digest(layer_codes.view(torch.uint8).numpy()) not in digests:
            yield LintFault(rule="fp8 share", node="", message=f"no product reads the codes of layer {path!r}")


def _codes_read(index: _GraphIndex, product: Any) -> Iterator[Any]:
    """Yield the FP8 constants among a product's decoded operands."""
    for value in filter(None, product.inputs):
        source = value.producer()
        while source is not None and source.op_type in PASSED_THROUGH:
            source = source.inputs[0].producer()
        if source is not None and source.op_type == DEQUANTIZE and index.constant(source.inputs[0]) is not None:
            yield source.inputs[0]


def _digest(codes: Any) -> tuple[tuple[int, ...], bytes]:
    """Shape and SHA-256, so that the bytes need not be stored."""
    return codes.shape, sha256(codes.tobytes()).digest()

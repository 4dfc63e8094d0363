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
SMALL = 1024  # elements; shapes are computed from constants of this size


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
    """Producers, types and constants of a graph's values."""

    def __init__(self, model: Any) -> None:
        import onnx

        self.onnx: Any = onnx
        types = onnx.TensorProto
        self.fp8: dict[int, str] = {
            types.FLOAT8E4M3FN: "E4M3",
            types.FLOAT8E5M2: "E5M2",
            types.FLOAT8E4M3FNUZ: "E4M3_FNUZ",
            types.FLOAT8E5M2FNUZ: "E5M2_FNUZ",
        }
        graph = model.graph
        self.nodes = list(graph.node)
        self.made_by = {name: node for node in self.nodes for name in node.output}
        self.constants = {each.name: each for each in graph.initializer}
        for node in self.nodes:
            if node.op_type == "Constant":
                for attribute in node.attribute:
                    if attribute.name == "value":
                        self.constants[node.output[0]] = attribute.t
        inferred = onnx.shape_inference.infer_shapes(_without_weights(model)).graph
        values = [*inferred.value_info, *inferred.input, *inferred.output]
        self.types = {each.name: each.type.tensor_type.elem_type for each in values}
        self.types |= {name: each.data_type for name, each in self.constants.items()}

    def number(self, name: str) -> Any:
        """Values of a constant as float64; None for computed values."""
        if name not in self.constants:
            return None
        values = self.onnx.numpy_helper.to_array(self.constants[name])
        return np.asarray(values).astype(np.float64)

    def name_of(self, kind: int) -> str:
        """Name of an element type."""
        return self.fp8.get(kind) or str(self.onnx.TensorProto.DataType.Name(kind))


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
        if node.op_type == CAST and index.types.get(node.output[0]) in index.fp8:
            faults.append(_fault("cast", node, "casts to FP8; TensorRT takes QuantizeLinear only"))
        if node.op_type in (QUANTIZE, DEQUANTIZE):
            faults += [*_scale(index, node), *_zero_point(index, node), *_dtype(index, node)]
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
    return LintFault(rule=rule, node=node.name or node.output[0], message=message)


def _formats(index: _GraphIndex) -> Iterator[LintFault]:
    for name, kind in index.types.items():
        if index.fp8.get(kind, "E4M3") != "E4M3":
            yield LintFault(rule="format", node=name, message=f"is {index.fp8[kind]}; TensorRT reads E4M3")


def _scale(index: _GraphIndex, node: Any) -> Iterator[LintFault]:
    scale = index.number(node.input[1])
    if scale is None:
        yield _fault("scale", node, "is computed in the graph; TensorRT takes constants")
    elif not (np.isfinite(scale).all() and (scale > 0).all()):
        worst = scale.reshape(-1)[int(np.argmin(np.where(np.isfinite(scale), scale, -np.inf)))]
        yield _fault("scale", node, f"is {worst}; scales are finite and above 0")


def _zero_point(index: _GraphIndex, node: Any) -> Iterator[LintFault]:
    if len(node.input) < 3 or not node.input[2]:
        return
    zero = index.number(node.input[2])
    if zero is None or zero.any():
        yield _fault("zero point", node, "is not the constant 0")


def _dtype(index: _GraphIndex, node: Any) -> Iterator[LintFault]:
    plain = node.input[0] if node.op_type == QUANTIZE else node.output[0]
    scale, wide = index.types.get(node.input[1]), index.types.get(plain)
    if scale is not None and wide is not None and scale != wide:
        names = index.name_of(scale), index.name_of(wide)
        yield _fault("dtype", node, f"has a scale in {names[0]} and a tensor in {names[1]}")


def _weights(index: _GraphIndex, expected: Mapping[str, Tensor]) -> Iterator[LintFault]:
    """Check that FP8 constants go to DequantizeLinear, and that products read those of all layers."""
    for node in index.nodes:
        for name in node.input:
            codes = name in index.constants and index.types[name] in index.fp8
            if codes and node.op_type not in (DEQUANTIZE, QUANTIZE):
                yield _fault("weight", node, f"reads the codes {name!r} without decoding them")
    codes_read = {name for node in index.nodes if node.op_type in PRODUCTS for name in _codes_read(index, node)}
    if not codes_read:
        yield LintFault(rule="fp8 share", node="", message="no product has a weight in FP8")
    digests = {_digest(index.onnx.numpy_helper.to_array(index.constants[name])) for name in codes_read}
    for path, layer_codes in expected.items():
        if _digest(layer_codes.view(torch.uint8).numpy()) not in digests:
            yield LintFault(rule="fp8 share", node="", message=f"no product reads the codes of layer {path!r}")


def _codes_read(index: _GraphIndex, product: Any) -> Iterator[str]:
    """Yield the FP8 constants among a product's decoded operands."""
    for name in product.input:
        source = index.made_by.get(name)
        while source is not None and source.op_type in PASSED_THROUGH:
            source = index.made_by.get(source.input[0])
        if source is not None and source.op_type == DEQUANTIZE and source.input[0] in index.constants:
            yield source.input[0]


def _digest(codes: Any) -> tuple[tuple[int, ...], bytes]:
    """Shape and SHA-256, so that the bytes need not be stored."""
    return codes.shape, sha256(codes.tobytes()).digest()


def _without_weights(model: Any) -> Any:
    """Copy of the model with large constants as inputs, for type inference without their bytes."""
    import onnx

    graph = model.graph
    small = [each for each in graph.initializer if _count(each) <= SMALL]
    large = [
        onnx.helper.make_tensor_value_info(each.name, each.data_type, each.dims)
        for each in graph.initializer
        if _count(each) > SMALL
    ]
    light = onnx.helper.make_graph(
        graph.node, graph.name, [*graph.input, *large], graph.output, small, value_info=graph.value_info
    )
    return onnx.helper.make_model(light, opset_imports=model.opset_import, ir_version=model.ir_version)


def _count(constant: Any) -> int:
    return int(np.prod(constant.dims, initial=1))

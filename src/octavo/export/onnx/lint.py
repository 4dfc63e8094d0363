"""What TensorRT accepts of an FP8 graph, looked up in the graph itself.

| rule                 | says                                                                             |
|----------------------|----------------------------------------------------------------------------------|
| format               | codes are E4M3: TensorRT reads no E5M2 and no FNUZ                               |
| cast                 | nothing is cast to FP8 but by QuantizeLinear                                     |
| scale                | scales are constants, finite and above 0                                         |
| zero point           | is 0, or not there                                                               |
| dtype                | a scale has the dtype of the tensor that is not codes                            |
| weight               | the codes of a constant are read by DequantizeLinear alone, next to its product  |
| fp8 share            | at least one product has a weight in FP8, and of each layer that should, one has |
|                      | that layer's codes                                                               |

Nothing here runs the graph; ``checks.py`` does.
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
    """Something that TensorRT refuses, or that is not FP8 though it looks so.

    Attributes:
        rule: one of the module's table.
        node: the node's name; "" is the whole graph.
        message: what is wrong.
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
        codes: FP8.
        total: all.
    """

    codes: int
    total: int

    @property
    def fp8_share(self) -> float:
        """Of the bytes; 0 for a graph without constants."""
        return self.codes / self.total if self.total else 0.0


class _Facts:
    """Where values come from and what type they have."""

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
        known = onnx.shape_inference.infer_shapes(_without_weights(model)).graph
        values = [*known.value_info, *known.input, *known.output]
        self.types = {each.name: each.type.tensor_type.elem_type for each in values}
        self.types |= {name: each.data_type for name, each in self.constants.items()}

    def number(self, name: str) -> Any:
        """A constant's values as float64; None for what is computed."""
        if name not in self.constants:
            return None
        values = self.onnx.numpy_helper.to_array(self.constants[name])
        return np.asarray(values).astype(np.float64)

    def name_of(self, kind: int) -> str:
        """An element type's name."""
        return self.fp8.get(kind) or str(self.onnx.TensorProto.DataType.Name(kind))


def lint(model: Any, *, weights: Mapping[str, Tensor] = MappingProxyType({})) -> tuple[LintFault, ...]:
    """Everything in an ONNX model that breaks a rule of the table.

    Args:
        model: ``onnx.ModelProto``, with its weights.
        weights: codes, E4M3 [K, N], that products have to read, by the paths of their layers.

    Example:
        >>> import onnx
        >>> graph = onnx.parser.parse_model('''
        ...     <ir_version: 10, opset_import: ["" : 21]>
        ...     g (float[2] x) => (float8e5m2[2] y) { y = Cast<to = 19>(x) }
        ... ''')
        >>> [fault.rule for fault in lint(graph)]
        ['format', 'cast', 'fp8 share']
    """
    facts = _Facts(model)
    faults = list(_formats(facts))
    for node in facts.nodes:
        if node.op_type == CAST and facts.types.get(node.output[0]) in facts.fp8:
            faults.append(_fault("cast", node, "casts to FP8; TensorRT takes QuantizeLinear only"))
        if node.op_type in (QUANTIZE, DEQUANTIZE):
            faults += [*_scale(facts, node), *_zero_point(facts, node), *_dtype(facts, node)]
    faults += _weights(facts, weights)
    return tuple(faults)


def graph_bytes(model: Any) -> GraphBytes:
    """How much of an ONNX model's constants is FP8."""
    import onnx

    codes = total = 0
    for each in model.graph.initializer:
        size = onnx.numpy_helper.to_array(each).nbytes
        total += size
        codes += size if each.data_type == onnx.TensorProto.FLOAT8E4M3FN else 0
    return GraphBytes(codes=codes, total=total)


def _fault(rule: str, node: Any, message: str) -> LintFault:
    return LintFault(rule=rule, node=node.name or node.output[0], message=message)


def _formats(facts: _Facts) -> Iterator[LintFault]:
    for name, kind in facts.types.items():
        if facts.fp8.get(kind, "E4M3") != "E4M3":
            yield LintFault(rule="format", node=name, message=f"is {facts.fp8[kind]}; TensorRT reads E4M3")


def _scale(facts: _Facts, node: Any) -> Iterator[LintFault]:
    scale = facts.number(node.input[1])
    if scale is None:
        yield _fault("scale", node, "is computed in the graph; TensorRT takes constants")
    elif not (np.isfinite(scale).all() and (scale > 0).all()):
        worst = scale.reshape(-1)[int(np.argmin(np.where(np.isfinite(scale), scale, -np.inf)))]
        yield _fault("scale", node, f"is {worst}; scales are finite and above 0")


def _zero_point(facts: _Facts, node: Any) -> Iterator[LintFault]:
    if len(node.input) < 3 or not node.input[2]:
        return
    zero = facts.number(node.input[2])
    if zero is None or zero.any():
        yield _fault("zero point", node, "is not the constant 0")


def _dtype(facts: _Facts, node: Any) -> Iterator[LintFault]:
    plain = node.input[0] if node.op_type == QUANTIZE else node.output[0]
    scale, wide = facts.types.get(node.input[1]), facts.types.get(plain)
    if scale is not None and wide is not None and scale != wide:
        names = facts.name_of(scale), facts.name_of(wide)
        yield _fault("dtype", node, f"has a scale in {names[0]} and a tensor in {names[1]}")


def _weights(facts: _Facts, wanted: Mapping[str, Tensor]) -> Iterator[LintFault]:
    """Constants in FP8 go to DequantizeLinear, some product reads one, and one reads each that is wanted."""
    for node in facts.nodes:
        for name in node.input:
            codes = name in facts.constants and facts.types[name] in facts.fp8
            if codes and node.op_type not in (DEQUANTIZE, QUANTIZE):
                yield _fault("weight", node, f"reads the codes {name!r} without decoding them")
    read = {name for node in facts.nodes if node.op_type in PRODUCTS for name in _codes_read(facts, node)}
    if not read:
        yield LintFault(rule="fp8 share", node="", message="no product has a weight in FP8")
    digests = {_digest(facts.onnx.numpy_helper.to_array(facts.constants[name])) for name in read}
    for path, wanted_codes in wanted.items():
        if _digest(wanted_codes.view(torch.uint8).numpy()) not in digests:
            yield LintFault(rule="fp8 share", node="", message=f"no product reads the codes of layer {path!r}")


def _codes_read(facts: _Facts, product: Any) -> Iterator[str]:
    """Those of a product's operands that are decoded constants in FP8."""
    for name in product.input:
        source = facts.made_by.get(name)
        while source is not None and source.op_type in PASSED_THROUGH:
            source = facts.made_by.get(source.input[0])
        if source is not None and source.op_type == DEQUANTIZE and source.input[0] in facts.constants:
            yield source.input[0]


def _digest(codes: Any) -> tuple[tuple[int, ...], bytes]:
    """Shape and bytes, without keeping the bytes."""
    return codes.shape, sha256(codes.tobytes()).digest()


def _without_weights(model: Any) -> Any:
    """The model with its large constants as inputs: types are inferred without their bytes."""
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

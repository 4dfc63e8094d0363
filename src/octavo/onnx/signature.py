"""Inputs and outputs of an exported graph, for model servers."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["GraphTensor", "graph_tensors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphTensor:
    """Input or output of a graph.

    Attributes:
        name: in the graph.
        datatype: in KServe's and Triton's notation: "INT64", "FP32", "FP16" or "BF16".
        dims: sizes without the batch dimension, which is the first; -1 for a dynamic one.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]


def graph_tensors(path: Path) -> tuple[list[GraphTensor], list[GraphTensor]]:
    """Read the inputs and the outputs of an exported graph."""
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    return _tensors(graph.input), _tensors(graph.output)


def _tensors(values: Iterable[Any]) -> list[GraphTensor]:
    from onnx import TensorProto

    datatypes = {
        TensorProto.INT64: "INT64",
        TensorProto.FLOAT: "FP32",
        TensorProto.FLOAT16: "FP16",
        TensorProto.BFLOAT16: "BF16",
    }
    tensors = []
    for value in values:
        tensor_type = value.type.tensor_type
        sizes = tuple(size.dim_value if size.HasField("dim_value") else -1 for size in tensor_type.shape.dim)
        tensors.append(GraphTensor(name=value.name, datatype=datatypes[tensor_type.elem_type], dims=sizes[1:]))
    return tensors

"""What a written graph takes and gives, as whoever serves it has to say."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["GraphTensor", "graph_tensors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphTensor:
    """An input or output of a graph.

    Attributes:
        name: as the graph has it.
        datatype: KServe's and Triton's word: "INT64", "FP32", "FP16" or "BF16".
        dims: without the batch, which is the first; -1 varies.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]


def graph_tensors(path: Path) -> tuple[list[GraphTensor], list[GraphTensor]]:
    """The inputs and the outputs of an exported graph."""
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    return _tensors(graph.input), _tensors(graph.output)


def _tensors(values: Iterable[Any]) -> list[GraphTensor]:
    from onnx import TensorProto

    words = {
        TensorProto.INT64: "INT64",
        TensorProto.FLOAT: "FP32",
        TensorProto.FLOAT16: "FP16",
        TensorProto.BFLOAT16: "BF16",
    }
    found = []
    for value in values:
        own = value.type.tensor_type
        sizes = tuple(size.dim_value if size.HasField("dim_value") else -1 for size in own.shape.dim)
        found.append(GraphTensor(name=value.name, datatype=words[own.elem_type], dims=sizes[1:]))
    return found

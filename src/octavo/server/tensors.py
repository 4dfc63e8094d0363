"""Tensors of KServe's protocol v2, encoded in JSON or as bytes after the JSON.

The first ``Inference-Header-Content-Length`` bytes of a body are JSON; the data of tensors with ``binary_data_size``
follows in their order. Numbers are little-endian; a BYTES value is a 32-bit length and its bytes.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.server.error_responses import ResponseError
from octavo.server.fields import Boolean, Field, FieldError, FieldKind, Integer, JsonObject, ListOf, String
from octavo.server.operations import parse_json

__all__ = ["HEADER_LENGTH", "INFER", "InferRequest", "KServeTensor", "pack", "unpack"]

HEADER_LENGTH = "Inference-Header-Content-Length"
LENGTH = struct.Struct("<I")
NUMBERS = {"BOOL": "<?", "INT32": "<i4", "INT64": "<i8", "FP32": "<f4"}
MOST_VALUES, MOST_TENSORS, MOST_DIMENSIONS = 2**16, 64, 8


@dataclass(frozen=True, slots=True)
class TensorValues(FieldKind):
    """List of values, possibly nested; read as a flat list in one pass."""

    types = (list,)

    def read(self, value: Any, place: str) -> list[Any]:
        """Return the values in their order."""
        if not isinstance(value, list):
            raise FieldError(place, "must be a list")
        values: list[Any] = []
        levels = [iter(value)]  # of the unfinished lists, the innermost last
        while levels:
            for entry in levels[-1]:
                if isinstance(entry, list):
                    if len(levels) == MOST_DIMENSIONS:
                        raise FieldError(place, f"may have at most {MOST_DIMENSIONS} levels of lists")
                    levels.append(iter(entry))
                    break
                if len(values) == MOST_VALUES:
                    raise FieldError(place, f"may have at most {MOST_VALUES} values; send fewer")
                values.append(entry)
            else:
                levels.pop()
        return values

    def schema(self) -> dict[str, Any]:
        """Return a schema of an array with any entries."""
        return {"type": "array", "items": {}}


@dataclass(frozen=True, slots=True)
class KServeTensor:
    """Tensor with its datatype, its shape and its values as a flat list."""

    datatype: str
    shape: list[int]
    values: list[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class InferRequest:
    """Content of an infer request.

    Attributes:
        id: returned with the answer.
        tensors: input tensors by name.
        binary: whether to send each requested output as bytes, by name; empty requests all outputs.
        binary_by_default: the same for outputs that ``binary`` does not name.
    """

    id: str | None
    tensors: Mapping[str, KServeTensor]
    binary: Mapping[str, bool]
    binary_by_default: bool


SIZE = Field(name="binary_data_size", kind=Integer(least=0, most=2**31), about="bytes after the JSON")
AS_BYTES = Field(name="binary_data", kind=Boolean(), about="send it as bytes")
ALL_AS_BYTES = Field(name="binary_data_output", kind=Boolean(), default=False, about="send all outputs as bytes")
INPUT = JsonObject(
    fields=(
        Field(name="name", kind=String(), required=True),
        Field(name="datatype", kind=String(words=("BYTES", *NUMBERS)), required=True),
        Field(name="shape", kind=ListOf(kind=Integer(least=0, most=MOST_VALUES), most=MOST_DIMENSIONS), required=True),
        Field(name="parameters", kind=JsonObject(fields=(SIZE,), others=True), default={"binary_data_size": None}),
        Field(name="data", kind=TensorValues(), about="values, unless they are sent as bytes"),
    )
)
OUTPUT = JsonObject(
    fields=(
        Field(name="name", kind=String(), required=True),
        Field(name="parameters", kind=JsonObject(fields=(AS_BYTES,), others=True), default={"binary_data": None}),
    )
)
INFER = JsonObject(
    fields=(
        Field(name="id", kind=String(), about="returned with the answer"),
        Field(name="inputs", kind=ListOf(kind=INPUT, most=MOST_TENSORS), required=True),
        Field(name="outputs", kind=ListOf(kind=OUTPUT, most=MOST_TENSORS, fewest=0), default=()),
        Field(
            name="parameters",
            kind=JsonObject(fields=(ALL_AS_BYTES,), others=True),
            default={"binary_data_output": False},
        ),
    )
)


def unpack(body: bytes, header_length: str | None) -> InferRequest:
    """Decode the body of an infer request.

    Args:
        body: JSON, optionally followed by the data of tensors.
        header_length: number of bytes that are JSON, from the HTTP header; None for all.

    Raises:
        ResponseError: the lengths do not match, or the header is not JSON.
        FieldError: a field is missing, unknown or invalid.

    Example:
        >>> tensor = {"name": "n", "datatype": "INT32", "shape": [1], "parameters": {"binary_data_size": 4}}
        >>> head = json.dumps({"inputs": [tensor]}).encode()
        >>> unpack(head + bytes([7, 0, 0, 0]), str(len(head))).tensors["n"].values
        [7]
    """
    length = len(body)
    if header_length is not None:
        if not (header_length.isascii() and header_length.isdigit() and int(header_length[:12]) <= len(body)):
            raise ResponseError(400, f"{HEADER_LENGTH} must be a number of bytes up to the body's {len(body)}")
        length = int(header_length)
    header = INFER.read(parse_json(body[:length]))
    behind = memoryview(body)[length:]
    tensors: dict[str, KServeTensor] = {}
    for tensor in header["inputs"]:
        if tensor["name"] in tensors:
            raise FieldError("inputs", f"has two tensors called {tensor['name']!r}; send one")
        tensors[tensor["name"]], behind = _tensor(tensor, behind)
    if len(behind):
        raise ResponseError(400, f"{len(behind)} bytes follow the last tensor; check the sizes")
    default = header["parameters"]["binary_data_output"]
    requested = {output["name"]: output["parameters"]["binary_data"] for output in header["outputs"]}
    binary = {name: default if as_bytes is None else as_bytes for name, as_bytes in requested.items()}
    return InferRequest(id=header["id"], tensors=tensors, binary=binary, binary_by_default=default)


def pack(head: dict[str, Any], name: str, texts: Sequence[str], *, binary: bool) -> tuple[bytes, dict[str, str]]:
    """Encode a response with one BYTES tensor; return it with the HTTP headers it needs."""
    output: dict[str, Any] = {"name": name, "datatype": "BYTES", "shape": [len(texts)]}
    if not binary:
        return json.dumps(head | {"outputs": [output | {"data": [*texts]}]}).encode(), {}
    values = [text.encode() for text in texts]
    behind = b"".join(LENGTH.pack(len(value)) + value for value in values)
    parameters = {"parameters": {"binary_data_size": len(behind)}}
    front = json.dumps(head | {"outputs": [output | parameters]}).encode()
    return front + behind, {HEADER_LENGTH: str(len(front))}


def _tensor(record: dict[str, Any], behind: memoryview) -> tuple[KServeTensor, memoryview]:
    """Decode one input; return it with the bytes that follow its data."""
    name, datatype, shape = record["name"], record["datatype"], record["shape"]
    size = record["parameters"]["binary_data_size"]
    if (size is None) == (record["data"] is None):
        raise FieldError("inputs", f"has a tensor {name!r} with both or none of data and binary_data_size; send one")
    if size is None:
        values = record["data"]
    elif size > len(behind):
        raise FieldError("inputs", f"has a tensor {name!r} of {size} bytes, of which {len(behind)} arrived")
    else:
        values, behind = _from_bytes(behind[:size], name, datatype), behind[size:]
    if len(values) != math.prod(shape):
        raise FieldError("inputs", f"has a tensor {name!r} of shape {shape} with {len(values)} values")
    return KServeTensor(datatype, shape, values), behind


def _from_bytes(data: memoryview, name: str, datatype: str) -> list[Any]:
    try:
        if datatype == "BYTES":
            return [str(value, "utf-8") for value in _texts(data)]
        return list(np.frombuffer(data, NUMBERS[datatype]).tolist())
    except (ValueError, struct.error) as error:
        raise FieldError("inputs", f"has a tensor {name!r} whose bytes are not {datatype}: {error}") from error


def _texts(data: memoryview) -> Iterator[memoryview]:
    while data:
        (length,) = LENGTH.unpack_from(data)
        if length > len(data) - LENGTH.size:
            raise ValueError(f"a value of {length} bytes exceeds the tensor")
        yield data[LENGTH.size : LENGTH.size + length]
        data = data[LENGTH.size + length :]

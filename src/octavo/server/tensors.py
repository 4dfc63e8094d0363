"""Tensors as KServe's protocol v2 sends them: in JSON, or as bytes behind the JSON.

A body is JSON, and behind its first ``Inference-Header-Content-Length`` bytes come those of the tensors that say
``binary_data_size``, in their order. Numbers are little-endian; a BYTES value is a 32-bit length and its bytes.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.server.fields import Field, FieldError, Flag, ListOf, Record, Text, Whole
from octavo.server.operations import parse_json
from octavo.server.refusals import Refusal

__all__ = ["HEADER_LENGTH", "INFER", "Inference", "Tensor", "pack", "unpack"]

HEADER_LENGTH = "Inference-Header-Content-Length"
LENGTH = struct.Struct("<I")
NUMBERS = {"BOOL": "<?", "INT32": "<i4", "INT64": "<i8", "FP32": "<f4"}
MOST_VALUES, MOST_TENSORS, MOST_DIMENSIONS = 2**16, 64, 8


@dataclass(frozen=True, slots=True)
class Values:
    """A list of values, flat or in lists; read as flat, each value looked at once."""

    def fit(self, given: Any) -> int:
        """See :class:`~octavo.server.fields.Kind`."""
        return int(isinstance(given, list))

    def read(self, given: Any, place: str) -> list[Any]:
        """The values in their order."""
        if not isinstance(given, list):
            raise FieldError(place, "must be a list")
        values: list[Any] = []
        levels = [iter(given)]  # of the lists that are not at their end, the innermost last
        while levels:
            for value in levels[-1]:
                if isinstance(value, list):
                    if len(levels) == MOST_DIMENSIONS:
                        raise FieldError(place, f"may have {MOST_DIMENSIONS} levels of lists at most")
                    levels.append(iter(value))
                    break
                if len(values) == MOST_VALUES:
                    raise FieldError(place, f"may have {MOST_VALUES} values at most; send fewer")
                values.append(value)
            else:
                levels.pop()
        return values

    def schema(self) -> dict[str, Any]:
        """As an array of anything."""
        return {"type": "array", "items": {}}


@dataclass(frozen=True, slots=True)
class Tensor:
    """Its values flat, and their shape."""

    datatype: str
    shape: list[int]
    values: list[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inference:
    """What an infer request sends.

    Attributes:
        id: comes back with the answer.
        tensors: by name.
        binary: by the name of an output that is asked for, whether it comes as bytes; empty for all outputs.
        binary_by_default: the same where an output says nothing.
    """

    id: str | None
    tensors: Mapping[str, Tensor]
    binary: Mapping[str, bool]
    binary_by_default: bool


SIZE = Field(name="binary_data_size", kind=Whole(least=0, most=2**31), about="bytes behind the JSON")
AS_BYTES = Field(name="binary_data", kind=Flag(), about="send it as bytes")
ALL_AS_BYTES = Field(name="binary_data_output", kind=Flag(), default=False, about="send all outputs as bytes")
INPUT = Record(
    fields=(
        Field(name="name", kind=Text(), required=True),
        Field(name="datatype", kind=Text(words=("BYTES", *NUMBERS)), required=True),
        Field(name="shape", kind=ListOf(kind=Whole(least=0, most=MOST_VALUES), most=MOST_DIMENSIONS), required=True),
        Field(name="parameters", kind=Record(fields=(SIZE,), others=True), default={"binary_data_size": None}),
        Field(name="data", kind=Values(), about="where it is not binary"),
    )
)
OUTPUT = Record(
    fields=(
        Field(name="name", kind=Text(), required=True),
        Field(name="parameters", kind=Record(fields=(AS_BYTES,), others=True), default={"binary_data": None}),
    )
)
INFER = Record(
    fields=(
        Field(name="id", kind=Text(), about="comes back with the answer"),
        Field(name="inputs", kind=ListOf(kind=INPUT, most=MOST_TENSORS), required=True),
        Field(name="outputs", kind=ListOf(kind=OUTPUT, most=MOST_TENSORS, fewest=0), default=()),
        Field(
            name="parameters", kind=Record(fields=(ALL_AS_BYTES,), others=True), default={"binary_data_output": False}
        ),
    )
)


def unpack(body: bytes, header_length: str | None) -> Inference:
    """What a body says.

    Args:
        body: JSON, and perhaps bytes behind it.
        header_length: how many bytes are JSON, as its header says; None for all.

    Raises:
        Refusal: the lengths do not fit, or it is no JSON.
        FieldError: it holds something else.

    Example:
        >>> tensor = {"name": "n", "datatype": "INT32", "shape": [1], "parameters": {"binary_data_size": 4}}
        >>> head = json.dumps({"inputs": [tensor]}).encode()
        >>> unpack(head + bytes([7, 0, 0, 0]), str(len(head))).tensors["n"].values
        [7]
    """
    length = len(body)
    if header_length is not None:
        if not (header_length.isascii() and header_length.isdigit() and int(header_length[:12]) <= len(body)):
            raise Refusal(400, f"{HEADER_LENGTH} must be a number of bytes up to the body's {len(body)}")
        length = int(header_length)
    given = INFER.read(parse_json(body[:length]))
    behind = memoryview(body)[length:]
    tensors: dict[str, Tensor] = {}
    for tensor in given["inputs"]:
        if tensor["name"] in tensors:
            raise FieldError("inputs", f"has two tensors called {tensor['name']!r}; send one")
        tensors[tensor["name"]], behind = _tensor(tensor, behind)
    if len(behind):
        raise Refusal(400, f"{len(behind)} bytes stand behind the last tensor; the sizes do not add up")
    outputs, everything = given["outputs"], given["parameters"]["binary_data_output"]
    wanted = {own["name"]: own["parameters"]["binary_data"] for own in outputs}
    binary = {name: everything if own is None else own for name, own in wanted.items()}
    return Inference(id=given["id"], tensors=tensors, binary=binary, binary_by_default=everything)


def pack(head: dict[str, Any], name: str, texts: Sequence[str], *, binary: bool) -> tuple[bytes, dict[str, str]]:
    """A response with one BYTES tensor, and the headers it needs."""
    output: dict[str, Any] = {"name": name, "datatype": "BYTES", "shape": [len(texts)]}
    if not binary:
        return json.dumps(head | {"outputs": [output | {"data": [*texts]}]}).encode(), {}
    values = [text.encode() for text in texts]
    behind = b"".join(LENGTH.pack(len(value)) + value for value in values)
    parameters = {"parameters": {"binary_data_size": len(behind)}}
    front = json.dumps(head | {"outputs": [output | parameters]}).encode()
    return front + behind, {HEADER_LENGTH: str(len(front))}


def _tensor(given: dict[str, Any], behind: memoryview) -> tuple[Tensor, memoryview]:
    """One input, and what of the bytes is left."""
    name, datatype, shape = given["name"], given["datatype"], given["shape"]
    size = given["parameters"]["binary_data_size"]
    if (size is None) == (given["data"] is None):
        raise FieldError("inputs", f"has a tensor {name!r} with both or none of data and binary_data_size; send one")
    if size is None:
        values = given["data"]
    elif size > len(behind):
        raise FieldError("inputs", f"has a tensor {name!r} of {size} bytes, of which {len(behind)} came")
    else:
        values, behind = _from_bytes(behind[:size], name, datatype), behind[size:]
    if len(values) != math.prod(shape):
        raise FieldError("inputs", f"has a tensor {name!r} of shape {shape} with {len(values)} values")
    return Tensor(datatype, shape, values), behind


def _from_bytes(data: memoryview, name: str, datatype: str) -> list[Any]:
    try:
        if datatype == "BYTES":
            return [str(value, "utf-8") for value in _texts(data)]
        return list(np.frombuffer(data, NUMBERS[datatype]).tolist())
    except (ValueError, struct.error) as error:
        raise FieldError("inputs", f"has a tensor {name!r} whose bytes are no {datatype}: {error}") from error


def _texts(data: memoryview) -> Iterator[memoryview]:
    while data:
        (length,) = LENGTH.unpack_from(data)
        if length > len(data) - LENGTH.size:
            raise ValueError(f"a value of {length} bytes ends behind the tensor")
        yield data[LENGTH.size : LENGTH.size + length]
        data = data[LENGTH.size + length :]

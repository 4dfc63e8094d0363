"""Input and output tensors of protocol v2, for octavo's server and for Triton.

``text_input`` holds one or several prompts. Every other tensor holds one value for all prompts or one for each;
``stop`` holds the stop texts of all answers. ``text_output`` is the answer without the prompt.
"""

from collections.abc import Mapping
from typing import Any

from octavo.server.fields import Field, FieldError, Integer, JsonObject, String
from octavo.server.responses import AnswerRequest
from octavo.server.sampling_fields import params_of, sampling_fields
from octavo.server.service import Service
from octavo.server.tensors import KServeTensor

__all__ = ["DATATYPES", "INPUT", "OUTPUT", "answer_request", "read_bodies", "request_fields"]

MAX_TOKENS = 16  # default
INPUT, OUTPUT = "text_input", "text_output"
DATATYPES = {
    INPUT: "BYTES",
    "max_tokens": "INT32",
    "temperature": "FP32",
    "top_p": "FP32",
    "top_k": "INT32",
    "min_p": "FP32",
    "seed": "INT64",
    "stop": "BYTES",
    "ignore_eos": "BOOL",
}


def request_fields(service: Service) -> JsonObject:
    """Fields of a request, sent as tensors or as plain JSON."""
    most = Integer(least=1, most=service.max_tokens)
    specific = (
        Field(name=INPUT, kind=String(), required=True, about="the prompt"),
        Field(name="max_tokens", kind=most, default=MAX_TOKENS, about="of the answer"),
    )
    return JsonObject(fields=(*specific, *(field for field in sampling_fields(service) if field.name in DATATYPES)))


def read_bodies(tensors: Mapping[str, KServeTensor], record: JsonObject, *, most: int) -> list[dict[str, Any]]:
    """Read one body for each prompt.

    Args:
        tensors: tensors by name.
        record: from :func:`request_fields`.
        most: largest number of prompts.

    Raises:
        FieldError: a tensor of the wrong type, or an invalid value.
    """
    for name, tensor in tensors.items():
        if tensor.datatype != DATATYPES.get(name, tensor.datatype):
            raise FieldError(ascii(name), f"must be a tensor of {DATATYPES[name]}, not {tensor.datatype}")
    count = len(tensors[INPUT].values) if INPUT in tensors else 1
    if not 1 <= count <= most:
        raise FieldError(INPUT, f"must have from 1 to {most} texts, not {count}")
    return [record.read(_row(tensors, i, count)) for i in range(count)]


def answer_request(service: Service, body: Mapping[str, Any], ids: list[int]) -> AnswerRequest:
    """Answer request from a body and its tokenized prompt."""
    return AnswerRequest(ids, params_of(body, service, choice=0, max_tokens=body["max_tokens"], logprobs=None), INPUT)


def _row(tensors: Mapping[str, KServeTensor], index: int, count: int) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, tensor in tensors.items():
        values = tensor.values
        if name == "stop":
            row[name] = values
        elif len(values) not in {1, count}:
            raise FieldError(ascii(name), f"has {len(values)} values for {count} texts; send one, or one for each")
        else:
            row[name] = values[index % len(values)]
    return row

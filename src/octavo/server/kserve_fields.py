"""The tensors of protocol v2 that ask for answers: one table for octavo's own server and for Triton's.

``text_input`` may hold several prompts, and every other tensor one value for all of them or one for each; ``stop``
holds the texts before which each answer ends. ``text_output`` is the answer, without the prompt.
"""

from collections.abc import Mapping
from typing import Any

from octavo.server.answers import Asked
from octavo.server.fields import Field, FieldError, Record, Text, Whole
from octavo.server.sampling_fields import params_of, sampling_fields
from octavo.server.service import Service
from octavo.server.tensors import Tensor

__all__ = ["DATATYPES", "INPUT", "OUTPUT", "asked", "bodies", "fields"]

MAX_TOKENS = 16  # where a request does not say
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


def fields(service: Service) -> Record:
    """By which a body is read, whether it came as tensors or as plain JSON."""
    most = Whole(least=1, most=service.max_tokens)
    own = (
        Field(name=INPUT, kind=Text(), required=True, about="the prompt"),
        Field(name="max_tokens", kind=most, default=MAX_TOKENS, about="of the answer"),
    )
    return Record(fields=(*own, *(field for field in sampling_fields(service) if field.name in DATATYPES)))


def bodies(tensors: Mapping[str, Tensor], record: Record, *, most: int) -> list[dict[str, Any]]:
    """A body for each text, read by the record.

    Args:
        tensors: by name.
        record: from :func:`fields`.
        most: how many texts are taken.

    Raises:
        FieldError: a tensor of another type, or a value that the record does not take.
    """
    for name, tensor in tensors.items():
        if tensor.datatype != DATATYPES.get(name, tensor.datatype):
            raise FieldError(ascii(name), f"is a tensor of {DATATYPES[name]}, not {tensor.datatype}")
    count = len(tensors[INPUT].values) if INPUT in tensors else 1
    if not 1 <= count <= most:
        raise FieldError(INPUT, f"holds from 1 to {most} texts, not {count}")
    return [record.read(_row(tensors, i, count)) for i in range(count)]


def asked(service: Service, body: Mapping[str, Any], ids: list[int]) -> Asked:
    """What a body asks of the engine, its prompt as tokens."""
    return Asked(ids, params_of(body, service, choice=0, max_tokens=body["max_tokens"], logprobs=None), INPUT)


def _row(tensors: Mapping[str, Tensor], index: int, count: int) -> dict[str, Any]:
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

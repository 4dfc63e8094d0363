"""Protobuf's text format, as config.pbtxt is written in: messages from dicts, with no need of protobuf."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["Word", "config_text"]


class Word(str):
    """A value of an enum, which is written without quotes."""

    __slots__ = ()


def config_text(message: Mapping[str, Any]) -> str:
    """A message: numbers, texts, truth values, :class:`Word`, dicts as messages, lists of them as repeated fields.

    Example:
        >>> print(config_text({"name": "m", "input": [{"name": "x", "data_type": Word("TYPE_FP32"), "dims": [-1]}]}))
        name: "m"
        input {
          name: "x"
          data_type: TYPE_FP32
          dims: -1
        }
        <BLANKLINE>
    """
    return "".join(f"{line}\n" for line in _lines(message))


def _lines(message: Mapping[str, Any]) -> Iterator[str]:
    for name, value in message.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Mapping):
                yield f"{name} {{"
                yield from (f"  {line}" for line in _lines(each))
                yield "}"
            else:
                yield f"{name}: {_scalar(each)}"


def _scalar(value: Any) -> str:
    if isinstance(value, Word):
        return value
    if isinstance(value, bool | str | int):
        return json.dumps(value, ensure_ascii=False)
    raise TypeError(f"protobuf's text has truth values, whole numbers and texts here, not a {type(value).__name__}")

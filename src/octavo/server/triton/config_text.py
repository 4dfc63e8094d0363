"""Writer of Protobuf's text format, for config.pbtxt: messages from dicts, without the protobuf library."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["EnumValue", "config_text"]


class EnumValue(str):
    """Enum value, written without quotes."""

    __slots__ = ()


def config_text(message: Mapping[str, Any]) -> str:
    """Format a message: integers, strings, booleans, :class:`EnumValue`, dicts as messages, lists as repeated fields.

    Example:
        >>> print(
        ...     config_text({"name": "m", "input": [{"name": "x", "data_type": EnumValue("TYPE_FP32"), "dims": [-1]}]})
        ... )
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
    if isinstance(value, EnumValue):
        return value
    if isinstance(value, bool | str | int):
        return json.dumps(value, ensure_ascii=False)
    raise TypeError(f"a field must be a bool, an int, a str, a dict or a list of them, not a {type(value).__name__}")

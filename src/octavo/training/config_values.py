"""Conversion of plain dicts from TOML and JSON to validated dataclasses."""

import math
import typing
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, TypeVar

from octavo.errors import ConfigError
from octavo.parsing import did_you_mean

__all__ = ["check_at_least", "check_member", "section"]

Section = TypeVar("Section")


def section(kind: type[Section], raw: Any, prefix: str) -> Section:
    """Create the dataclass ``kind`` from a dict; ``prefix`` precedes its keys in errors, such as "training.".

    Raises:
        ConfigError: an unknown key, one that is missing, or a value of the wrong type, by name.
    """
    if not isinstance(raw, dict):
        raise ConfigError(f"{prefix.rstrip('.')} must be a section of keys, not {raw!r}")
    hints = typing.get_type_hints(kind)
    dataclass_fields = fields(kind)  # type: ignore[arg-type] # kind is a dataclass
    allowed = [f.name for f in dataclass_fields]
    for key in raw:
        if key not in allowed:
            where = f"section [{prefix.rstrip('.')}]" if prefix else "configuration"
            raise ConfigError(
                f"the {where} has no key {key!r}{did_you_mean(key, allowed)}; it takes {', '.join(allowed)}"
            )
    for f in dataclass_fields:
        if f.name not in raw and f.default is f.default_factory is MISSING:
            raise ConfigError(f"{prefix}{f.name} is missing")
    return kind(**{key: _value(hints[key], value, f"{prefix}{key}") for key, value in raw.items()})


def _value(hint: Any, value: Any, name: str) -> Any:
    """Convert ``value`` to the type ``hint``: enums from strings, tuples from lists, floats from integers."""
    if is_dataclass(hint):
        return section(typing.cast("type[Any]", hint), value, f"{name}.")
    origin, kinds = typing.get_origin(hint), typing.get_args(hint)
    if origin is UnionType:
        instead, usual = (
            (NoneType, kinds[0]) if NoneType in kinds else (str, float)
        )  # None, or a string in place of a number
        return value if isinstance(value, instead) else _value(usual, value, name)
    if isinstance(value, _HELD_AS.get(origin, ())):
        return _several(hint, value, name)
    if origin is None and issubclass(hint, StrEnum):
        check_member(name, value, hint)
        return hint(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if hint is Any or (isinstance(value, origin or hint) and (hint is bool or not isinstance(value, bool))):
        return value
    raise ConfigError(f"{name} must be {_TYPE_WORDS.get(origin or hint, hint)}, not {value!r}")


def _several(hint: Any, value: Any, name: str) -> Any:
    """Convert a table, a list of one type, or a list with one type per item."""
    origin, kinds = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(value, dict):
        _, kind = kinds
        return {key: _value(kind, item, f"{name}.{key}") for key, item in value.items()}
    if origin is list or kinds[-1] is Ellipsis:
        return origin(_value(kinds[0], item, f"{name}[{index}]") for index, item in enumerate(value))
    if len(value) != len(kinds):
        raise ConfigError(
            f"{name} must hold lists of {' and '.join(_TYPE_WORDS[kind] for kind in kinds)}, not {list(value)!r}"
        )
    return tuple(_value(kind, item, name) for kind, item in zip(kinds, value, strict=True))


_HELD_AS: dict[Any, Any] = {tuple: (list, tuple), list: list, dict: dict, Mapping: dict}
_TYPE_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    tuple: "a list",
    list: "a list",
    dict: "a table",
    Mapping: "a table",
}


def check_member(name: str, value: object, kind: Collection[str] | type[StrEnum]) -> None:
    """Check that a value is a member of an enum, or one of several names.

    Raises:
        ConfigError: the value is not a member.
    """
    if value not in list(kind):
        raise ConfigError(
            f"{name} must be one of {', '.join(kind)}, not {value!r}{did_you_mean(str(value), list(kind))}"
        )


def check_at_least(name: str, value: float, least: int) -> None:
    """Check that a number is finite and at least ``least``.

    Raises:
        ConfigError: the number is smaller, infinite or NaN.
    """
    if not least <= value < math.inf:
        raise ConfigError(f"{name} must be at least {least}, not {value}")

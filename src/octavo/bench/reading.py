"""A report read from the JSON it wrote, and refused by the place that is not as it was written.

A file may be another program's, cut off, or edited by hand. Whatever is in it is looked at here, so that drawing it
cannot fail when half of it is written.
"""

import json
import re
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from octavo.bench.results import Report
from octavo.errors import DataError

__all__ = ["load_report"]

DAY = re.compile(r"\d{4}-\d{2}-\d{2}")  # a part of file names
WORDS = {str: "a string", float: "a number", bool: "true or false", type(None): "null", dict: "a table", list: "a list"}

T = TypeVar("T")


def load_report(path: Path) -> Report:
    """A report from the JSON it wrote.

    Raises:
        DataError: the file is no such report; says where.
    """
    try:
        report = _record(Report, json.loads(path.read_text(encoding="utf-8")), "the whole")
        if "device" not in report.facts:
            raise ValueError("facts have no 'device'")
        if DAY.fullmatch(report.measured) is None:
            raise ValueError(f"measured is {report.measured!r}, not a day such as 2026-01-31")
    except (ValueError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{path} is no result of octavo bench: {error}; give a .json that the command wrote, as it was written"
        ) from error
    return report


def _record(kind: type[T], value: Any, place: str) -> T:
    """A dataclass from a table of its fields."""
    _check(value, dict, place)
    hints = typing.get_type_hints(kind)
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type] # kind is a dataclass
    if unknown := sorted(value.keys() - known.keys()):
        raise ValueError(f"{place} has a {unknown[0]!r}, which is not known here")
    for name, each in known.items():
        if name not in value and each.default is each.default_factory is MISSING:
            raise ValueError(f"{place} has no {name!r}")
    prefix = "" if kind is Report else f"{place}."
    return kind(**{name: _value(hints[name], item, f"{prefix}{name}") for name, item in value.items()})


def _value(hint: Any, value: Any, place: str) -> Any:
    """``value`` as a field of the type ``hint`` holds it."""
    origin, kinds = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if is_dataclass(hint):
        return _record(typing.cast("type[Any]", hint), value, place)
    if type(None) in kinds:  # a field that may be empty
        return None if value is None else _value(kinds[0], value, place)
    if origin in (tuple, list):
        _check(value, list, place)
        return origin(_value(kinds[0], item, f"{place}[{index}]") for index, item in enumerate(value))
    if origin in (dict, Mapping):
        _check(value, dict, place)
        return {name: _value(kinds[1], item, f"{place}[{name!r}]") for name, item in value.items()}
    _check(value, hint, place)
    return float(value) if hint is float else value


def _check(value: Any, kind: type, place: str) -> None:
    allowed: Any = (int, float) if kind is float else kind
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{place} is {WORDS.get(type(value), WORDS[float])}, not {WORDS[kind]}")

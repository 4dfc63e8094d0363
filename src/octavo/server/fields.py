"""Declarations of request bodies, which both validate a body and describe it.

A body is declared as a :class:`JsonObject` of :class:`Field`. ``read(value)`` validates a body and fills in defaults;
``schema()`` returns its JSON Schema for ``/openapi.json``, so that the document matches the validation.

Numbers follow JSON Schema: 5.0 is an integer, true is not. Text must be valid Unicode; JSON allows unpaired surrogates.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from octavo.errors import ConfigError
from octavo.text.sources import is_unicode

__all__ = [
    "Boolean",
    "Const",
    "Field",
    "FieldError",
    "FieldKind",
    "Integer",
    "JsonObject",
    "ListOf",
    "Number",
    "OneOf",
    "String",
]

Schema = dict[str, Any]


class FieldError(ConfigError):
    """Invalid value in a body.

    Attributes:
        field: name of the top-level field: ``param`` of the OpenAI API.
    """

    def __init__(self, place: str, sentence: str) -> None:
        super().__init__(f"{place or 'the body'} {sentence}")
        self.field: str | None = place.partition(".")[0].partition("[")[0] or None


class FieldKind(ABC):
    """Type of a field's value, of Python's classes ``types``."""

    __slots__ = ()
    types: ClassVar[tuple[type, ...]] = ()

    def fit(self, value: Any) -> int:
        """Return how many levels of the value match this type, judged by first entries; 0 for a mismatch."""
        return int(isinstance(value, self.types))

    @abstractmethod
    def read(self, value: Any, place: str) -> Any:
        """Validate and convert the value at ``place``; raise :class:`FieldError` if it is invalid."""

    @abstractmethod
    def schema(self) -> Schema:
        """Return the JSON Schema of valid values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class String(FieldKind):
    """Unicode text of ``shortest`` to ``longest`` characters; one of ``words`` if given."""

    types = (str,)
    words: tuple[str, ...] | None = None
    shortest: int = 0
    longest: int | None = None

    def read(self, value: Any, place: str) -> str:
        """Return the text."""
        if not isinstance(value, str):
            raise FieldError(place, f"must be text, not {_shown(value)}")
        if not is_unicode(value):
            raise FieldError(place, "contains an unpaired surrogate; send Unicode text")
        if self.words is not None and value not in self.words:
            raise FieldError(place, f"must be one of {', '.join(map(repr, self.words))}, not {_shown(value)}")
        if len(value) < self.shortest:
            raise FieldError(place, f"must have at least {self.shortest} character{'s' * (self.shortest > 1)}")
        if self.longest is not None and len(value) > self.longest:
            raise FieldError(place, f"may have at most {self.longest} characters, not {len(value)}")
        return value

    def schema(self) -> Schema:
        """Return a string schema."""
        words = None if self.words is None else [*self.words]
        return {"type": "string"} | _keywords(enum=words, minLength=self.shortest, maxLength=self.longest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Integer(FieldKind):
    """Integer from ``least`` to ``most``."""

    types = (int, float)
    least: int
    most: int

    def read(self, value: Any, place: str) -> int:
        """Return the number as an int."""
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or not self.least <= value <= self.most:
            allowed = f"a whole number from {self.least} to {self.most}" if self.least < self.most else self.least
            raise FieldError(place, f"must be {allowed}, not {_shown(value)}")
        return int(value)

    def schema(self) -> Schema:
        """Return an integer schema."""
        return {"type": "integer", "minimum": self.least, "maximum": self.most}


@dataclass(frozen=True, slots=True, kw_only=True)
class Number(FieldKind):
    """Finite number from ``least`` to ``most``; above ``least`` if not ``inclusive``."""

    types = (int, float)
    least: float
    most: float
    inclusive: bool = True

    def read(self, value: Any, place: str) -> float:
        """Return the number as a float."""
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not self.least <= value <= self.most or (value == self.least and not self.inclusive):
            bounds = f"from {self.least:g}" if self.inclusive else f"above {self.least:g} and up"
            allowed = f"a number {bounds} to {self.most:g}" if self.least < self.most else f"{self.least:g}"
            raise FieldError(place, f"must be {allowed}, not {_shown(value)}")
        return float(value)

    def schema(self) -> Schema:
        """Return a number schema."""
        lower = "minimum" if self.inclusive else "exclusiveMinimum"
        return {"type": "number", lower: self.least, "maximum": self.most}


@dataclass(frozen=True, slots=True, kw_only=True)
class Boolean(FieldKind):
    """True or false."""

    types = (bool,)

    def read(self, value: Any, place: str) -> bool:
        """Return the boolean."""
        if not isinstance(value, bool):
            raise FieldError(place, f"must be true or false, not {_shown(value)}")
        return value

    def schema(self) -> Schema:
        """Return a boolean schema."""
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Const(FieldKind):
    """Null or one of ``values``, for a field whose other values need a feature that octavo does not have.

    Example:
        >>> Const((False,)).read(True, "store")
        Traceback (most recent call last):
        ...
        octavo.server.fields.FieldError: store must be false or null, not true; leave it out
    """

    values: tuple[Any, ...] = ()

    def fit(self, value: Any) -> int:
        """See :class:`FieldKind`."""
        return int(value is None or any(type(value) is type(each) and value == each for each in self.values))

    def read(self, value: Any, place: str) -> Any:
        """Return the value."""
        if not self.fit(value):
            allowed = " or ".join(map(json.dumps, (*self.values, None)))
            entries = " with entries" if isinstance(value, list | dict) and value else ""
            raise FieldError(place, f"must be {allowed}, not {_shown(value)}{entries}; leave it out")
        return value

    def schema(self) -> Schema:
        """Return an enum schema."""
        return {"enum": [*self.values, None]}


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOf(FieldKind):
    """List of ``fewest`` to ``most`` values of one type."""

    kind: FieldKind
    most: int
    fewest: int = 1

    def fit(self, value: Any) -> int:
        """See :class:`FieldKind`."""
        if not isinstance(value, list):
            return 0
        return 1 + (self.kind.fit(value[0]) if value else 0)

    def read(self, value: Any, place: str) -> list[Any]:
        """Return the list of converted entries."""
        if not isinstance(value, list):
            raise FieldError(place, f"must be a list, not {_shown(value)}")
        if not self.fewest <= len(value) <= self.most:
            raise FieldError(place, f"must have from {self.fewest} to {self.most} entries, not {len(value)}")
        return [self.kind.read(entry, f"{place}[{i}]") for i, entry in enumerate(value)]

    def schema(self) -> Schema:
        """Return an array schema."""
        return {"type": "array", "items": self.kind.schema(), "minItems": self.fewest, "maxItems": self.most}


@dataclass(frozen=True, slots=True)
class OneOf(FieldKind):
    """Value of one of several types of different shape; the type with the best ``fit`` reads it and reports errors."""

    kinds: tuple[FieldKind, ...]

    def fit(self, value: Any) -> int:
        """See :class:`FieldKind`."""
        return max(kind.fit(value) for kind in self.kinds)

    def read(self, value: Any, place: str) -> Any:
        """Return the value as the best fitting type reads it."""
        return max(self.kinds, key=lambda kind: kind.fit(value)).read(value, place)

    def schema(self) -> Schema:
        """Return an anyOf schema."""
        return {"anyOf": [kind.schema() for kind in self.kinds]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Named field of a body.

    Attributes:
        name: name in the JSON object.
        kind: type of the value.
        about: one-line description for ``/openapi.json``.
        required: whether it must be present and not null.
        default: value of an absent or null field that is not required.
    """

    name: str
    kind: FieldKind
    about: str = ""
    required: bool = False
    default: Any = None

    def schema(self) -> Schema:
        """Return the schema of the value with its default and description."""
        schema = self.kind.schema()
        if not self.required:
            schema = {"anyOf": [*schema.get("anyOf", [schema]), {"type": "null"}]} | _keywords(default=self.default)
        return schema | _keywords(description=self.about)


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonObject(FieldKind):
    """JSON object with these fields; an unknown field is an error unless ``others`` is true.

    Example:
        >>> body = JsonObject(fields=(Field(name="n", kind=Integer(least=1, most=9), default=1),))
        >>> body.read({}), body.read({"n": 2})
        ({'n': 1}, {'n': 2})
        >>> body.read({"n": True})
        Traceback (most recent call last):
        ...
        octavo.server.fields.FieldError: n must be a whole number from 1 to 9, not true
        >>> body.schema()["additionalProperties"]
        False
    """

    types = (Mapping,)
    fields: tuple[Field, ...]
    others: bool = False

    def read(self, value: Any, place: str = "") -> dict[str, Any]:
        """Return all fields by name."""
        if not isinstance(value, Mapping):
            raise FieldError(place, f"must be a JSON object, not {_shown(value)}")
        names = [field.name for field in self.fields]
        if not self.others and (unknown := [name for name in value if name not in names]):
            raise FieldError(
                _within(place, ascii(unknown[0])[1:-1][:80]), f"is not a known field; the fields are {', '.join(names)}"
            )
        return {field.name: self._value(field, value, place) for field in self.fields}

    def schema(self) -> Schema:
        """Return an object schema."""
        required = [field.name for field in self.fields if field.required]
        return {
            "type": "object",
            "properties": {field.name: field.schema() for field in self.fields},
            "additionalProperties": self.others,
        } | _keywords(required=required)

    @staticmethod
    def _value(field: Field, body: Mapping[str, Any], place: str) -> Any:
        value = body.get(field.name)
        if value is None and field.required:
            raise FieldError(_within(place, field.name), "is missing")
        return field.default if value is None else field.kind.read(value, _within(place, field.name))


def _within(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _keywords(**settings: Any) -> Schema:
    """Keywords of a schema that are not empty."""
    return {name: value for name, value in settings.items() if value not in (None, "", [], 0) or value is False}


def _shown(value: Any) -> str:
    """Short one-line form of a JSON value for error messages."""
    names = {True: "true", False: "false", None: "null"}
    if isinstance(value, bool) or value is None:
        return names[value]
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = ascii(value) if not isinstance(value, int) or abs(value) < 10**40 else "a number of over 40 digits"
    return text if len(text) <= 60 else f"{text[:60]}…"

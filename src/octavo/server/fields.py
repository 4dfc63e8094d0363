"""What a request's body may hold: one table for each kind of body, by which it is read and described.

A table is a :class:`Record` of :class:`Field`. ``record.read(given)`` checks a body and fills in defaults;
``record.schema()`` is the same as JSON Schema, for ``/openapi.json``. So what the file promises is what is checked.

Numbers are read as JSON Schema means them: 5.0 is a whole number, true is none. Text has to be Unicode, which JSON can
miss by half of a surrogate pair.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from octavo.errors import ConfigError
from octavo.text.sources import is_unicode

__all__ = ["Field", "FieldError", "Flag", "Kind", "ListOf", "Number", "OneOf", "Only", "Record", "Text", "Whole"]

Schema = dict[str, Any]


class FieldError(ConfigError):
    """A value that a body may not hold.

    Attributes:
        field: the name of the field at the top, as the OpenAI API's ``param`` has it.
    """

    def __init__(self, place: str, sentence: str) -> None:
        super().__init__(f"{place or 'the body'} {sentence}")
        self.field: str | None = place.partition(".")[0].partition("[")[0] or None


class Kind(Protocol):
    """Of values."""

    def fit(self, given: Any) -> int:
        """How many levels of lists deep a value, judged by its first entries, has this kind's shape."""

    def read(self, given: Any, place: str) -> Any:
        """The value as octavo uses it; raises :class:`FieldError` for another one."""

    def schema(self) -> Schema:
        """The same as JSON Schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Unicode text of ``shortest`` to ``longest`` characters; where there are ``words``, one of them."""

    words: tuple[str, ...] | None = None
    shortest: int = 0
    longest: int | None = None

    def fit(self, given: Any) -> int:
        """See :class:`Kind`."""
        return int(isinstance(given, str))

    def read(self, given: Any, place: str) -> str:
        """The text."""
        if not isinstance(given, str):
            raise FieldError(place, f"must be text, not {_shown(given)}")
        if not is_unicode(given):
            raise FieldError(place, "has half of a surrogate pair, which is no character; send Unicode text")
        if self.words is not None and given not in self.words:
            raise FieldError(place, f"must be one of {', '.join(map(repr, self.words))}, not {_shown(given)}")
        if len(given) < self.shortest:
            raise FieldError(place, f"must have at least {self.shortest} character{'s' * (self.shortest > 1)}")
        if self.longest is not None and len(given) > self.longest:
            raise FieldError(place, f"may have {self.longest} characters at most, not {len(given)}")
        return given

    def schema(self) -> Schema:
        """As a string."""
        words = None if self.words is None else [*self.words]
        return {"type": "string"} | _given(enum=words, minLength=self.shortest, maxLength=self.longest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A whole number from ``least`` to ``most``."""

    least: int
    most: int

    def fit(self, given: Any) -> int:
        """See :class:`Kind`."""
        return int(isinstance(given, int | float))

    def read(self, given: Any, place: str) -> int:
        """The number."""
        whole = isinstance(given, int) or (isinstance(given, float) and given.is_integer())
        if isinstance(given, bool) or not whole or not self.least <= given <= self.most:
            allowed = f"a whole number from {self.least} to {self.most}" if self.least < self.most else self.least
            raise FieldError(place, f"must be {allowed}, not {_shown(given)}")
        return int(given)

    def schema(self) -> Schema:
        """As an integer."""
        return {"type": "integer", "minimum": self.least, "maximum": self.most}


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A finite number from ``least`` to ``most``, or above ``least`` where that is not ``inclusive``."""

    least: float
    most: float
    inclusive: bool = True

    def fit(self, given: Any) -> int:
        """See :class:`Kind`."""
        return int(isinstance(given, int | float))

    def read(self, given: Any, place: str) -> float:
        """The number."""
        number = isinstance(given, int | float) and not isinstance(given, bool)
        if not number or not self.least <= given <= self.most or (given == self.least and not self.inclusive):
            bounds = f"from {self.least:g}" if self.inclusive else f"above {self.least:g} and up"
            allowed = f"a number {bounds} to {self.most:g}" if self.least < self.most else f"{self.least:g}"
            raise FieldError(place, f"must be {allowed}, not {_shown(given)}")
        return float(given)

    def schema(self) -> Schema:
        """As a number."""
        lower = "minimum" if self.inclusive else "exclusiveMinimum"
        return {"type": "number", lower: self.least, "maximum": self.most}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """True or false."""

    def fit(self, given: Any) -> int:
        """See :class:`Kind`."""
        return int(isinstance(given, bool))

    def read(self, given: Any, place: str) -> bool:
        """The flag."""
        if not isinstance(given, bool):
            raise FieldError(place, f"must be true or false, not {_shown(given)}")
        return given

    def schema(self) -> Schema:
        """As a boolean."""
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Only:
    """Of a field whose other values would ask for what octavo has not, the ``values`` that change nothing, or null.

    Example:
        >>> Only((False,)).read(True, "store")
        Traceback (most recent call last):
        ...
        octavo.server.fields.FieldError: store may be false or null alone, not true; leave it out
    """

    values: tuple[Any, ...] = ()

    def fit(self, given: Any) -> int:
        """See :class:`Kind`."""
        return int(given is None or any(type(given) is type(value) and given == value for value in self.values))

    def read(self, given: Any, place: str) -> Any:
        """The value."""
        if not self.fit(given):
            allowed = " or ".join(map(json.dumps, (*self.values, None)))
            raise FieldError(place, f"may be {allowed} alone, not {_shown(given)}; leave it out")
        return given

    def schema(self) -> Schema:
        """As one of the values."""
        return {"enum": [*self.values, None]}


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOf:
    """From ``fewest`` to ``most`` values of one kind."""

    kind: Kind
    most: int
    fewest: int = 1

    def fit(self, given: Any) -> int:
        """See :class:`Kind`."""
        if not isinstance(given, list):
            return 0
        return 1 + (self.kind.fit(given[0]) if given else 0)

    def read(self, given: Any, place: str) -> list[Any]:
        """All of them."""
        if not isinstance(given, list):
            raise FieldError(place, f"must be a list, not {_shown(given)}")
        if not self.fewest <= len(given) <= self.most:
            raise FieldError(place, f"must have from {self.fewest} to {self.most} entries, not {len(given)}")
        return [self.kind.read(value, f"{place}[{i}]") for i, value in enumerate(given)]

    def schema(self) -> Schema:
        """As an array."""
        return {"type": "array", "items": self.kind.schema(), "minItems": self.fewest, "maxItems": self.most}


@dataclass(frozen=True, slots=True)
class OneOf:
    """A value of any of several kinds, no two of the same shape: of the one whose shape it has, and its errors."""

    kinds: tuple[Kind, ...]

    def fit(self, given: Any) -> int:
        """See :class:`Kind`."""
        return max(kind.fit(given) for kind in self.kinds)

    def read(self, given: Any, place: str) -> Any:
        """The value."""
        return max(self.kinds, key=lambda kind: kind.fit(given)).read(given, place)

    def schema(self) -> Schema:
        """As any of theirs."""
        return {"anyOf": [kind.schema() for kind in self.kinds]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A named value of a body.

    Attributes:
        name: as it is sent.
        kind: what it may be.
        about: one line for a reader of the API.
        required: without it a body is refused; other fields may be left out or null, and are ``default`` then.
        default: for what is not sent.
    """

    name: str
    kind: Kind
    about: str = ""
    required: bool = False
    default: Any = None

    def schema(self) -> Schema:
        """Of the value, with what it is without it."""
        own = self.kind.schema()
        if not self.required:
            own = {"anyOf": [*own.get("anyOf", [own]), {"type": "null"}]} | _given(default=self.default)
        return own | _given(description=self.about)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A JSON object with these fields; others are refused by name unless ``others`` lets them be.

    Example:
        >>> body = Record(fields=(Field(name="n", kind=Whole(least=1, most=9), default=1),))
        >>> body.read({}), body.read({"n": 2})
        ({'n': 1}, {'n': 2})
        >>> body.read({"n": True})
        Traceback (most recent call last):
        ...
        octavo.server.fields.FieldError: n must be a whole number from 1 to 9, not true
        >>> body.schema()["additionalProperties"]
        False
    """

    fields: tuple[Field, ...]
    others: bool = False

    def fit(self, given: Any) -> int:
        """See :class:`Kind`."""
        return int(isinstance(given, Mapping))

    def read(self, given: Any, place: str = "") -> dict[str, Any]:
        """Every field by its name."""
        if not isinstance(given, Mapping):
            raise FieldError(place, f"must be a JSON object, not {_shown(given)}")
        names = [field.name for field in self.fields]
        if not self.others and (unknown := [name for name in given if name not in names]):
            raise FieldError(
                _within(place, ascii(unknown[0])[1:-1][:80]), f"is not known here; the fields are {', '.join(names)}"
            )
        return {field.name: self._value(field, given, place) for field in self.fields}

    def schema(self) -> Schema:
        """As an object."""
        required = [field.name for field in self.fields if field.required]
        return {
            "type": "object",
            "properties": {field.name: field.schema() for field in self.fields},
            "additionalProperties": self.others,
        } | _given(required=required)

    @staticmethod
    def _value(field: Field, given: Mapping[str, Any], place: str) -> Any:
        value = given.get(field.name)
        if value is None and field.required:
            raise FieldError(_within(place, field.name), "is missing")
        return field.default if value is None else field.kind.read(value, _within(place, field.name))


def _within(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _given(**settings: Any) -> Schema:
    """Those that say something."""
    return {name: value for name, value in settings.items() if value not in (None, "", [], 0) or value is False}


def _shown(value: Any) -> str:
    """A value of JSON's for a sentence: short, and on one line."""
    names = {True: "true", False: "false", None: "null"}
    if isinstance(value, bool) or value is None:
        return names[value]
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = ascii(value) if not isinstance(value, int) or abs(value) < 10**40 else "a number of over 40 digits"
    return text if len(text) <= 60 else f"{text[:60]}…"

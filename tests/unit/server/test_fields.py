"""What a body may hold: read and described by one table, so jsonschema's word on the description is the oracle."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema_rs import validator_for

from octavo.server.fields import Boolean, Const, Field, FieldError, Integer, JsonObject, ListOf, Number, OneOf, String

INNER = JsonObject(fields=(Field(name="on", kind=Boolean(), required=True),))
BODY = JsonObject(
    fields=(
        Field(name="a", kind=String(shortest=1, longest=4), required=True),
        Field(name="b", kind=Integer(least=-3, most=3), default=1),
        Field(name="c", kind=Number(least=0, most=1, inclusive=False)),
        Field(name="d", kind=OneOf((String(words=("x", "y")), ListOf(kind=Integer(least=0, most=9), most=2)))),
        Field(name="e", kind=ListOf(kind=INNER, most=2, fewest=0)),
        Field(name="f", kind=JsonObject(fields=(), others=True)),
        Field(name="h", kind=Const((False, [], {"on": "x"}))),
    )
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-4, 10)
    | st.sampled_from([0.5, 1.0, 1.5, 2.0, -0.0, 1e300, 10**400])
    | st.sampled_from(["", "x", "y", "abcd", "abcde", "é"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["on", "off"]), inner, max_size=2),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from("abcdefgh"), VALUES, max_size=4))
def test_read_accepts_what_the_schema_allows(body):
    allowed = validator_for(BODY.schema()).is_valid(body)
    try:
        found = BODY.read(body)
    except FieldError:
        assert not allowed
    else:
        assert allowed
        assert found.keys() == set("abcdefh")
        plain = {name: value for name, value in body.items() if value is not None and name not in "ef"}
        assert all(
            found[name] == value for name, value in plain.items()
        )  # records give every field they know, no other


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        ([], None, "the body must be a JSON object, not a list"),
        ({}, "a", "a is missing"),
        ({"a": "x", "zz\ud800": 1}, "zz\\ud800", "is not a known field; the fields are a, b, c, d, e, f, h"),
        ({"a": 1}, "a", "a must be text, not 1"),
        ({"a": "\ud800"}, "a", "unpaired surrogate"),
        ({"a": "abcde"}, "a", "at most 4 characters, not 5"),
        ({"a": "x", "b": 10**400}, "b", "from -3 to 3, not a number of over 40 digits"),
        ({"a": "x", "b": True}, "b", "not true"),
        ({"a": "x", "b": float("nan")}, "b", "not nan"),
        ({"a": "x", "c": 0}, "c", "above 0 and up to 1, not 0"),
        ({"a": "x", "c": float("inf")}, "c", "not inf"),
        ({"a": "x", "d": [1, 20]}, "d", r"d\[1\] must be a whole number from 0 to 9, not 20"),
        ({"a": "x", "e": [{"on": 1}]}, "e", r"e\[0\].on must be true or false, not 1"),
        ({"a": "x", "h": 0}, "h", r'h must be false or \[\] or {"on": "x"} or null, not 0; leave it out'),
        ({"a": "x", "e": {}}, "e", "e must be a list, not an object"),
        ({"a": "x" * 99, "b": "y" * 99}, "a", "at most"),
    ],
    ids=repr,
)
def test_errors_name_the_field_and_the_range(body, field, says):
    with pytest.raises(FieldError, match=says) as caught:
        BODY.read(body)
    assert caught.value.field == field
    assert str(caught.value).isascii()


def test_schema_marks_optional_fields():
    schema = json.loads(json.dumps(BODY.schema()))
    assert schema["required"] == ["a"]
    assert schema["properties"]["b"]["default"] == 1
    assert schema["properties"]["d"]["anyOf"][-1] == {"type": "null"}

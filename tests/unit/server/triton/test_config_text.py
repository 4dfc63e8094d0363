"""Text that protobuf reads back as what was written, by protobuf itself where it is installed."""

import pytest

from octavo.server.triton.config_text import EnumValue, config_text

MESSAGE = {
    "name": 'a "name" \\ with\nlines and ümlauts',
    "max_batch_size": 4,
    "kind": EnumValue("KIND_CPU"),
    "is_shape_tensor": False,
    "dims": [-1, 3],
    "empty": {},
    "nested": [{"key": "x", "value": {"decoupled": True}}, {"key": "y", "value": {}}],
}


def test_every_kind_of_value():
    assert config_text(MESSAGE) == (
        'name: "a \\"name\\" \\\\ with\\nlines and ümlauts"\n'
        "max_batch_size: 4\n"
        "kind: KIND_CPU\n"
        "is_shape_tensor: false\n"
        "dims: -1\n"
        "dims: 3\n"
        "empty {\n}\n"
        'nested {\n  key: "x"\n  value {\n    decoupled: true\n  }\n}\n'
        'nested {\n  key: "y"\n  value {\n  }\n}\n'
    )


def test_protobuf_parses_the_text():
    text_format = pytest.importorskip("google.protobuf.text_format", reason="protobuf is not installed")
    from google.protobuf.struct_pb2 import Struct

    texts = ["plain", MESSAGE["name"], "\t\x01\x7f", "\U0001f600"]
    written = config_text({"fields": [{"key": text, "value": {"string_value": text}} for text in texts]})
    assert dict(text_format.Parse(written, Struct())) == {text: text for text in texts}


def test_unsupported_values_raise():
    with pytest.raises(TypeError, match="not a float"):
        config_text({"x": 0.5})

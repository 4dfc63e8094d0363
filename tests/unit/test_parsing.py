import json

import pytest
import torch
from safetensors.torch import save

from octavo import parsing
from octavo.errors import DataError
from octavo.parsing import (
    KEY_PART,
    library_errors,
    parse_json,
    parse_tensors,
    parse_tokenizer,
    parse_toml,
    read_json,
    read_object,
    read_toml,
)

HOSTILE_JSON: dict[str, tuple[str | bytes, str]] = {
    "deep": ("[" * 100_000, "nests deeper than 100 levels"),
    "deep and whole": ('{"a":' * 101 + "1" + "}" * 101, "nests deeper than 100 levels"),
    "long integer": ("9" * 5000, "999999999999… of 5000 digits is too large"),
    "infinite number": ("[1e999]", "1e999 is too large"),
    "NaN": ('{"a": NaN}', "NaN is no number in JSON"),
    "Infinity": ("-Infinity", "-Infinity is no number in JSON"),
    "half a pair": (r'["\ud800"]', "half of a surrogate pair"),
    "half a pair as a key": (r'{"\udfff": 1}', "half of a surrogate pair"),
    "not UTF-8": (b'"\xff"', "not UTF-8 at byte 1"),
    "cut off": ('{"a": ', "Expecting value"),
    "empty": ("", "Expecting value"),
}
HOSTILE_TOML: dict[str, tuple[str | bytes, str]] = {
    "deep": ("a = " + "[" * 100_000, "nests deeper than 100 levels"),
    "long key": (".".join("a" * 50_000) + " = 1", "nests deeper than 100 levels"),
    "long key in quotes": (" . ".join(['"a b"'] * 20_000) + " = 1", "nests deeper than 100 levels"),
    "long integer": ("a = " + "9" * 5000, "thousands of digits"),
    "hexadecimal integer": ("a = [{b = 0x1" + "f" * 5000 + "}]", "an integer of 20001 bits is too large"),
    "not UTF-8": (b"a = '\xe9'", "not UTF-8 at byte 5"),
    "twice": ("a = 1\na = 2", "Cannot overwrite a value"),
}


@pytest.mark.parametrize("what", HOSTILE_JSON)
def test_hostile_json_is_refused_by_its_reason(what):
    text, reason = HOSTILE_JSON[what]
    with pytest.raises(DataError, match=reason):
        parse_json(text)


@pytest.mark.parametrize("what", HOSTILE_TOML)
def test_hostile_toml_is_refused_by_its_reason(what):
    text, reason = HOSTILE_TOML[what]
    with pytest.raises(DataError, match=reason):
        parse_toml(text)


def test_plain_text_reads_as_python_reads_it():
    value = {"a": [1, -2.5e-7, True, None, "ä😀"], "deep": [[[[0]]]], "limit": 10**30}
    assert parse_json(json.dumps(value)) == parse_json(json.dumps(value, ensure_ascii=False).encode()) == value
    assert parse_json("[" * 100 + "]" * 100) == json.loads("[" * 100 + "]" * 100)
    assert parse_toml("[a.b]\nc = [0.1, 0.2]\nd = -9223372036854775808") == {
        "a": {"b": {"c": [0.1, 0.2], "d": -(2**63)}}
    }
    assert parse_toml("a = [" + "0.5," * 1000 + "]") == {"a": [0.5] * 1000}


def test_toml_key_parts_are_read_once(monkeypatch):
    """Keys of 99 parts in a comment: to search for 100 from each part on takes 100 times as long."""
    looks = 0

    class Counted:
        def finditer(self, text):
            nonlocal looks
            for part in KEY_PART.finditer(text):
                looks += part.end(1) - part.start()
                yield part

    monkeypatch.setattr(parsing, "KEY_PART", Counted())
    text = "# " + ("a." * 98 + "a ") * 500 + "\nb = 1"
    assert parse_toml(text) == {"b": 1}
    assert 0 < looks <= len(text)


@pytest.mark.parametrize("head", ['x = {"y" = 1, ', "x = [0.5, 0.25]\n", "# it's\n", "[", "'#' = 1\n"])
def test_a_key_of_99_parts_is_read_and_one_of_101_is_not(head):
    for part in ("a", '"b c"', "'.'"):
        with pytest.raises(DataError, match="nests deeper than 100 levels"):
            parse_toml(head + " . ".join([part] * 101) + " = 1")
    assert parse_toml(" . ".join(["a"] * 99) + " = 1")


@pytest.mark.parametrize("mark", ["\ufeff", b"\xef\xbb\xbf"])
def test_a_byte_order_mark_is_passed_over(mark):
    text = '{"a": 1}' if isinstance(mark, str) else b'{"a": 1}'
    assert parse_json(mark + text) == {"a": 1}
    assert parse_toml(mark + ("a = 1" if isinstance(mark, str) else b"a = 1")) == {"a": 1}


def test_options_widen_and_narrow_what_is_read():
    assert parse_json("[Infinity, 1e999]", allow_nan=True) == [float("inf")] * 2
    assert parse_json("[-8]", largest=8) == [-8]
    with pytest.raises(DataError, match="the number 9 is too large"):
        parse_json("[9]", largest=8)


def test_a_file_is_read_within_limits(tmp_path, monkeypatch):
    path = tmp_path / "some.json"
    path.write_text("[1]")
    assert read_json(path) == [1]
    with pytest.raises(DataError, match="a list where a JSON object belongs"):
        read_object(path)
    monkeypatch.setattr("octavo.parsing.MOST_BYTES", 2)
    with pytest.raises(DataError, match="larger than"):
        read_json(path)
    with pytest.raises(FileNotFoundError):
        read_toml(tmp_path / "none.toml")


@pytest.mark.parametrize("text", ["", "{}", "[" * 100_000, '{"version": "1.0", "model": {"type": "BPE"}}'])
def test_a_damaged_tokenizer_is_refused(text):
    with pytest.raises(DataError):
        parse_tokenizer(text)


def test_damaged_tensors_are_refused():
    content = save({"a": torch.ones(3)})
    assert parse_tensors(content)["a"].tolist() == [1, 1, 1]
    for damaged in (b"", content[:-1], content.replace(b"F32", b"F99"), b"\xff" * 8 + content[8:]):
        with pytest.raises(DataError):
            parse_tensors(damaged)


def test_rust_panic_is_a_data_error_and_signals_propagate():
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
    with pytest.raises(DataError, match=r"broke down \(called `Option::unwrap\(\)`\)"), library_errors():
        raise panic("called `Option::unwrap()`\nnote: run with RUST_BACKTRACE=1")
    with pytest.raises(KeyboardInterrupt), library_errors():
        raise KeyboardInterrupt

"""``octavo data``: its sums against the files themselves, and sources that hold no text."""

import json
import os

import pytest


def test_builtin_corpus_is_the_running_pythons_library(octavo):
    printed = json.loads(octavo("data", "--json").stdout)
    assert "PSF" in printed["licence"]
    total = sum(row["bytes"] for row in printed["splits"])
    assert 5_000_000 < total < 30_000_000
    assert {row["split"] for row in printed["splits"]} == {"train", "validation", "test"}
    assert {row["kind"] for row in printed["splits"]} >= {"library source"}


def test_own_text_is_counted_to_the_byte(octavo, tmp_path):
    text = "".join(f"line {n}: naïve café\n" for n in range(2000))
    (tmp_path / "own.txt").write_text(text, encoding="utf-8")
    printed = json.loads(octavo("data", "--data", tmp_path / "own.txt", "--json").stdout)
    assert sum(row["bytes"] for row in printed["splits"]) == len(text.encode())


def test_table_has_a_row_a_split_and_a_sum(octavo, tmp_path):
    (tmp_path / "own.md").write_text("word " * 5000)
    printed = octavo("data", "--data", tmp_path).stdout
    assert all(word in printed for word in ("train", "validation", "test", "all", "25,000"))


@pytest.mark.parametrize("name", [b"caf\xe9.txt", b"caf\xe9.jsonl", b"caf\xe9.parquet", b"caf\xe9/own.txt"])
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_file_whose_name_is_not_utf_8_is_refused_in_one_sentence(octavo, tmp_path, name, more):
    path = tmp_path / os.fsdecode(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text("text enough to read")
    result = octavo("data", "--data", tmp_path, *more)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: the file name")
    assert r"caf\udce9" in result.stderr
    assert "rename" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("missing.txt", None, "missing.txt"),
        ("empty.txt", b"", "empty"),
        ("binary.txt", b"\x00\x01\xff" * 100, "NUL byte"),
        ("latin.txt", "naïve".encode("latin-1"), "UTF-8"),
    ],
)
def test_a_source_without_text_is_refused_in_one_sentence(octavo, tmp_path, name, content, word):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    result = octavo("data", "--data", tmp_path / name)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert word in result.stderr
    assert name in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1

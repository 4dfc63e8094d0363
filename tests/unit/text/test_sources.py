"""Every kind of source, good and bad."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from octavo.errors import ConfigError, DataError
from octavo.memory import memory_bytes
from octavo.text.corpus import Document, Split
from octavo.text.named_datasets import hub_access
from octavo.text.sources import divide, load_documents, same_source, unseen_split


def write_parquet(path, columns):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed; parquet cannot be written for the test")
    from pyarrow import parquet

    parquet.write_table(pa.table(columns), path)


def test_a_text_file(tmp_path):
    path = tmp_path / "novel.txt"
    path.write_bytes("Grüße\r\naus Köln\n".encode())
    assert load_documents(path) == [Document("novel.txt", "Grüße\naus Köln\n")]


def test_a_folder_in_name_order_with_every_suffix(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.md").write_text("# one")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "c.jsonl").write_text('{"text": "row 1", "id": 7}\n\n{"text": "row 2"}\n')
    (tmp_path / "image.png").write_bytes(b"\0\1")
    write_parquet(tmp_path / "d.parquet", {"text": ["p", None, "", "q"], "n": [1, 2, 3, 4]})
    found = [(document.path, document.text) for document in load_documents(tmp_path)]
    assert found == [
        ("a.txt", "a"), ("b/one.md", "# one"), ("c.jsonl:1", "row 1"), ("c.jsonl:3", "row 2"),
        ("d.parquet:0", "p"), ("d.parquet:3", "q"),
    ]  # fmt: skip


BAD = {
    "empty.txt": (b"", "is empty"),
    "blank.txt": (b" \n\n", "is empty"),
    "nul.txt": (b"abc\0def", "NUL byte at offset 3"),
    "latin.txt": ("Grüße".encode("latin-1"), "invalid UTF-8 at offset 2"),
    "broken.jsonl": (b'{"text": "a"}\n{"text": \n', "line 2 of .* is not JSON"),
    "other.jsonl": (b'{"text": "a"}\n{"content": "a"}\n', "line 2 of .* has no string 'text'"),
    "two.jsonl": (b'{"q": "a", "a": "b", "id": 1}\n', r"no column 'text'; its columns of text are q, a: choose one, "),
    "number.jsonl": (b'{"text": 3}\n', "no string 'text'"),
    "list.jsonl": (b"[1]\n", "no string 'text'"),
    "surrogate.jsonl": (b'{"text": "\\ud800"}\n', "line 1 of .* surrogate"),
    "deep.jsonl": (b"[" * 200_000 + b"\n", "line 1 of .* is not JSON"),
    "long.jsonl": (b'{"text": ' + b"9" * 6000 + b"}\n", "line 1 of .* is not JSON"),
    "fake.parquet": (b"PAR1 but not really", "not a parquet file"),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses_what_is_not_text_by_name(tmp_path, name):
    content, words = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        load_documents(tmp_path / name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_column_is_the_only_one_of_strings_or_the_one_named(tmp_path):
    write_parquet(tmp_path / "x.parquet", {"content": ["a"], "id": [1]})
    assert load_documents(tmp_path / "x.parquet") == [Document("x.parquet:0", "a")]
    write_parquet(tmp_path / "y.parquet", {"question": ["q"], "answer": ["a"], "id": [1]})
    with pytest.raises(
        DataError, match=r"columns of text are question, answer: choose one, such as --data '.*\?column="
    ):
        load_documents(tmp_path / "y.parquet")
    with pytest.raises(DataError, match="no column of text 'id'; it has question, answer"):
        load_documents(f"{tmp_path}/y.parquet?column=id")
    assert load_documents(f"{tmp_path}/y.parquet?column=answer") == [Document("y.parquet:0", "a")]
    (tmp_path / "z.jsonl").write_text('{"question": "q", "answer": "a"}')
    assert load_documents(f"{tmp_path}/z.jsonl?column=answer") == [Document("z.jsonl:1", "a")]
    assert not same_source(f"{tmp_path}/z.jsonl?column=answer", f"{tmp_path}/z.jsonl?column=question")
    with pytest.raises(ConfigError, match="config, split and mb are for named data sets"):
        load_documents(f"{tmp_path}/z.jsonl?mb=3")


@pytest.mark.parametrize("source", ["missing.txt", "./nowhere", "gone/", "texts", "here/mised", "a b/c"])
def test_missing_path_is_refused_without_a_hub_lookup(tmp_path, monkeypatch, source):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)  # an import would fail
    with hub_access(), pytest.raises(DataError, match="there is no file or folder"):
        load_documents(source)


@pytest.mark.parametrize("source", ["/dev/zero", "pipe", "link.txt"])
def test_special_file_is_refused_unread(tmp_path, monkeypatch, source):
    def read(self):
        raise AssertionError(f"{self} was read")

    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link.txt").symlink_to("/dev/zero")
    monkeypatch.setattr(Path, "read_bytes", read)
    with pytest.raises(DataError, match="is not a regular file; copy its content to a file"):
        load_documents(tmp_path / source)


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "parquet"])
def test_text_beyond_the_memory_is_refused_unread(tmp_path, suffix):
    names = [tmp_path / f"{name}.{suffix}" for name in "ab"]
    for name in names:
        name.touch()
        os.truncate(name, memory_bytes(torch.device("cpu")) // 2 + 1)  # of holes: it takes no disk
    for source in (tmp_path, names[0]):
        if source == names[0]:
            os.truncate(source, 1 << 42)
        with pytest.raises(ConfigError, match=r"the text in .* does not fit in the memory .* give a part of it"):
            load_documents(source)


def test_an_empty_folder(tmp_path):
    with pytest.raises(DataError, match=r"holds no .*txt"):
        load_documents(tmp_path)


def test_pieces_partition_the_text():
    text = "".join(f"line {i} of a text that is long enough to be cut\n" for i in range(2000))
    splits = divide([Document("novel.txt", text)], by_file=False)
    pieces = {d.path: d.text for held in splits.values() for d in held}
    in_order = sorted(pieces, key=lambda path: int(path.partition("#")[2]))
    assert "".join(pieces[path] for path in in_order) == text
    for split in (Split.VALIDATION, Split.TEST):
        share = sum(len(d.text) for d in splits[split]) / len(text)
        assert 0.1 <= share < 0.12


def test_large_texts_hold_out_a_fiftieth():
    documents = [Document(f"{i}.txt", "word " * 20_000 + "\n") for i in range(200)]
    held = sum(len(d.text) for d in divide(documents, by_file=False)[Split.VALIDATION])
    assert held / sum(len(d.text) for d in documents) == pytest.approx(0.02, abs=0.006)


def test_dividing_does_not_depend_on_order():
    documents = [Document(f"{i}.txt", json.dumps(list(range(i)))) for i in range(1, 60)]
    forward, backward = (divide(list(order), by_file=False) for order in (documents, documents[::-1]))
    assert {d.path for d in forward[Split.TEST]} == {d.path for d in backward[Split.TEST]}


def test_every_character_but_a_line_end_may_stand_in_a_row(tmp_path):
    text = "a\u2028b\u2029c\x85d\x0be"
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    # \x0b must be escaped in JSON; the others need not be.
    assert [document.text for document in load_documents(tmp_path / "x.jsonl")] == [text]


def test_byte_order_mark_is_removed(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n', encoding="utf-8-sig")
    assert load_documents(tmp_path / "x.jsonl") == [Document("x.jsonl:1", "a")]


def test_a_text_of_one_line_is_held_out_in_part():
    text = " ".join(str(number) for number in range(20_000))
    splits = divide([Document("text8", text)], by_file=False)
    pieces = {d.path: d.text for held in splits.values() for d in held}
    assert "".join(pieces[path] for path in sorted(pieces, key=lambda path: int(path.partition("#")[2]))) == text
    for split in (Split.VALIDATION, Split.TEST):
        assert 0.1 <= sum(len(d.text) for d in splits[split]) / len(text) < 0.12


def test_an_empty_source_is_not_the_current_folder():
    with pytest.raises(DataError, match="source is empty"):
        load_documents("")


def test_builtin_text_has_no_columns():
    with pytest.raises(ConfigError, match=r"'builtin' is text of octavo's own and has no columns"):
        load_documents("builtin?column=content")


def test_unseen_split_of_known_sources(tmp_path, monkeypatch):
    (tmp_path / "own.txt").write_text("x")
    (tmp_path / "other.txt").write_text("y")
    monkeypatch.chdir(tmp_path)
    assert same_source("own.txt", f"{tmp_path}/./own.txt")
    assert not same_source("own.txt", "other.txt")
    assert not same_source("builtin", "library-sources")
    for name in ("own.txt", "./own.txt", str(tmp_path / "own.txt")):
        assert unseen_split(name, "own.txt") == "test"
    assert unseen_split("other.txt", "own.txt") == "all"
    for one, other in (("builtin", "library-sources"), ("library-sources", "builtin")):
        assert unseen_split(one, other) == "test"
    assert unseen_split("language-topics", "builtin") == "all"

"""The built-in corpus: what is in it, what is not, and how it divides."""

import hashlib
import pydoc_data.topics
import sysconfig
from collections import Counter
from pathlib import Path

import pytest

from octavo.errors import DataError
from octavo.text import corpus
from octavo.text.corpus import Document, Split, builtin_documents, content_hash, corpus_summary, split_of


@pytest.fixture(scope="module")
def documents():
    return builtin_documents()


def test_holds_megabytes_of_sources_and_the_reference(documents):
    by_path = {document.path: document.text for document in documents}
    assert sum(map(len, by_path.values())) > 6_000_000
    assert by_path["json/decoder.py"] == Path(__import__("json.decoder").decoder.__file__).read_text(encoding="utf-8")
    assert by_path["pydoc_data/topics/for"] == pydoc_data.topics.topics["for"]
    assert len([path for path in by_path if path.startswith("pydoc_data")]) == len(pydoc_data.topics.topics)


def test_corpus_excludes_generated_and_optional_files(documents):
    parts = Counter(part for document in documents for part in Path(document.path).parts)
    for name in ("test", "tests", "site-packages", "idlelib", "tkinter", "turtle.py", "topics.py", "__pycache__"):
        assert parts[name] == 0, name
    paths = {document.path for document in documents}
    assert "encodings/cp1252.py" not in paths
    assert "encodings/idna.py" in paths
    assert not [path for path in paths if "_sysconfigdata" in path]


@pytest.mark.long
def test_order_and_text_are_the_same_every_time(documents):
    again = builtin_documents()
    assert [d.path for d in again] == sorted(d.path for d in documents)
    assert content_hash(again) == content_hash(documents)


def test_split_follows_from_the_path_alone():
    digest = hashlib.blake2b(b"json/decoder.py", digest_size=6).digest()
    fraction = int.from_bytes(digest, "big") / 2**48
    assert fraction >= 2 * corpus.HELD_OUT_SHARE
    assert split_of("json/decoder.py") is Split.TRAIN
    assert split_of("json/decoder.py", held_out_share=fraction + 1e-9) is Split.VALIDATION
    assert split_of("json/decoder.py", held_out_share=fraction / 2 + 1e-9) is Split.TEST


def test_shares_of_many_paths():
    counts = Counter(split_of(f"package/module_{i}.py") for i in range(20_000))
    assert counts[Split.VALIDATION] / 20_000 == pytest.approx(0.03, abs=0.005)
    assert counts[Split.TEST] / 20_000 == pytest.approx(0.03, abs=0.005)


def test_held_out_splits_are_large_enough_for_a_stable_loss(documents):
    for split in (Split.VALIDATION, Split.TEST):
        assert sum(len(d.text) for d in documents if split_of(d.path) is split) > 100_000


@pytest.mark.long
def test_summary_adds_up(documents):
    summary = corpus_summary()
    assert sum(summary.documents.values()) == len(documents)
    assert sum(summary.bytes.values()) == sum(len(d.text.encode()) for d in documents)
    assert summary.content_hash == content_hash(documents)
    assert "PSF" in summary.licence


def test_hash_depends_on_paths_texts_and_their_borders():
    one = content_hash([Document("a", "bc")])
    assert len({one, content_hash([Document("ab", "c")]), content_hash([Document("a", "bd")])}) == 3


def test_a_python_without_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(corpus, "_topics", lambda: iter(()))
    with pytest.raises(DataError, match=r"holds no \.py sources"):
        builtin_documents()

"""Windows to evaluate on: the topics as the benchmarks read them, other text as text_windows spreads it."""

import pydoc_data.topics

import pytest
import torch

from octavo.errors import ConfigError, DataError
from octavo.quantization import text_windows
from octavo.quantization.comparison import evaluation_text
from octavo.quantization.comparison.evaluation_text import evaluation_windows
from octavo.text import corpus
from octavo.text.corpus import Document, Split, library_documents, topic_documents
from octavo.text.sources import BUILTIN, LIBRARY_SOURCES, TOPICS, divide, load_documents
from tests.unit.quantization.tiny_models import language_model


def test_topics_are_one_text_from_its_beginning():
    model = language_model()
    ids = model.tokenizer.encode("".join(pydoc_data.topics.topics.values())[:20_000]).ids
    found = evaluation_windows(model, TOPICS, "all", count=5, length=64)
    assert found.dtype == torch.int64
    assert found.flatten().tolist() == ids[: 5 * 64]


def test_a_tokenizer_that_cuts_is_not_obeyed():
    model = language_model()
    expected = evaluation_windows(model, TOPICS, "all", count=3, length=64)
    model.tokenizer.enable_truncation(100)
    assert torch.equal(evaluation_windows(model, TOPICS, "all", count=3, length=64), expected)
    assert len(model.tokenizer.encode("some text " * 1000).ids) == 100


def test_other_text_is_spread(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("".join(f"line {number} of some text\n" for number in range(2000)))
    model = language_model()
    found = evaluation_windows(model, str(path), "all", count=4, length=32)
    assert torch.equal(found, text_windows(model, path, "all", count=4, length=32))


def test_windows_that_cannot_be():
    model = language_model()
    for length in (1, model.context + 1):
        with pytest.raises(ConfigError, match="from 2 to 64 tokens"):
            evaluation_windows(model, TOPICS, "all", count=1, length=length)
    with pytest.raises(ConfigError, match="has no splits"):
        evaluation_windows(model, TOPICS, "test", count=1, length=8)
    with pytest.raises(ConfigError, match="at least 1, not 0"):
        evaluation_windows(model, TOPICS, "all", count=0, length=8)


def test_too_little_text(monkeypatch):
    monkeypatch.setattr(evaluation_text, "load_documents", lambda _: [Document("a", "some"), Document("b", " text")])
    assert evaluation_windows(language_model(), TOPICS, "all", count=1, length=2).shape == (1, 2)
    with pytest.raises(DataError, match="has 2 tokens, not 4"):
        evaluation_windows(language_model(), TOPICS, "all", count=2, length=2)


def test_library_and_topics_are_the_corpus_in_two(monkeypatch):
    """Calibration on the one has seen nothing of the other; splits are those of the whole."""
    sources = [Document(f"module_{number}.py", f"x = {number}") for number in range(200)]
    monkeypatch.setattr(corpus, "_sources", lambda _: iter(sources))
    own = {document.path: document.text for document in load_documents(BUILTIN)}
    library, topics = load_documents(LIBRARY_SOURCES), load_documents(TOPICS)
    assert {document.path: document.text for document in [*library, *topics]} == own
    assert len(library) + len(topics) == len(own)
    assert (library, topics) == (library_documents(), topic_documents())
    assert [document.text for document in topics] == list(pydoc_data.topics.topics.values())
    whole = divide(load_documents(BUILTIN), by_file=True)
    parts = divide(library, by_file=False)
    assert parts[Split.TEST]
    for split in Split:
        paths = [document.path for document in whole[split] if not document.path.startswith("pydoc_data/topics/")]
        assert [document.path for document in parts[split]] == paths

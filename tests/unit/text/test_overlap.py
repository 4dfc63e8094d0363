"""The same text is the same text under whatever name."""

import shutil

import pytest

from octavo.errors import ConfigError
from octavo.text import corpus, overlap
from octavo.text.corpus import Document
from octavo.text.overlap import MOST_SHARED, shared_share


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("".join(f"line {number} says something else\n" for number in range(3000)))
    return path


def test_equivalent_paths_are_the_same_source(own, monkeypatch):
    monkeypatch.chdir(own.parent)
    (own.parent / "link.txt").symlink_to(own)
    for name in ("./own.txt", "link.txt", str(own)):
        assert shared_share(("own.txt", "train"), (name, "train")) == 1
        assert shared_share(("own.txt", "train"), (name, "all")) == 1
        assert shared_share(("own.txt", "train"), (name, "test")) == 0


def test_copy_is_detected_by_its_text(own):
    """Its splits may be other ones, since they follow from the name: all of one in a part of the other is counted."""
    copy = own.with_name("copy.txt")
    shutil.copy(own, copy)
    assert shared_share((str(own), "all"), (str(copy), "train")) == 1
    assert shared_share((str(own), "all"), (str(copy), "all")) == 1
    assert shared_share((str(own), "train"), (str(copy), "train")) > MOST_SHARED


def test_the_share_is_of_characters(own):
    """Counted by hand; spaces around a line do not count."""
    other = own.with_name("other.txt")
    known = [f"line {number} says something else" for number in range(1000, 1200)]
    new = [f"quite another, of twice that length, .,.,.,.,., {number}" for number in range(1000, 1200)]
    assert (len(known[0]), len(new[0])) == (29, 52)
    other.write_text("".join(f"{one}\n  {two}\n" for one, two in zip(known, new, strict=True)))
    assert shared_share((str(own), "all"), (str(other), "all")) == pytest.approx(29 / 81)
    assert shared_share((str(other), "all"), (str(own), "all")) == pytest.approx(200 / 3000, rel=0.02)


def test_the_corpus_has_its_two_parts_in_it(monkeypatch):
    sources = [Document(f"module_{number}.py", f"x_{number} = {number}\n" * 200) for number in range(300)]
    topics = [Document(f"pydoc_data/topics/{number}", f"About topic {number}.\n" * 100) for number in range(50)]
    monkeypatch.setattr(corpus, "_sources", lambda _: iter(sources))
    monkeypatch.setattr(corpus, "_topics", lambda: iter(topics))
    assert shared_share(("builtin", "train"), ("library-sources", "train")) == 1
    assert shared_share(("library-sources", "train"), ("builtin", "train")) > MOST_SHARED
    assert shared_share(("builtin", "train"), ("language-topics", "all")) > MOST_SHARED
    assert shared_share(("library-sources", "train"), ("language-topics", "all")) == 0
    assert shared_share(("library-sources", "train"), ("builtin", "test")) == 0


def test_two_splits_of_a_source_are_not_read(monkeypatch):
    monkeypatch.setattr(overlap, "load_documents", lambda _: pytest.fail("read"))
    assert shared_share(("builtin", "train"), ("builtin", "test")) == 0


def test_an_unknown_split_is_refused(own):
    with pytest.raises(ConfigError, match="not 'dev'"):
        shared_share((str(own), "dev"), (str(own), "test"))

"""The words of the source and the documents: those of the field, not a dialect of the project."""

import ast
import re

import pytest

from tests.policy.source_tree import ROOT, tracked_files

DIALECT = re.compile(r"\b(whoever|nobody|what there is|as it comes|it is none|taken apart)\b", re.IGNORECASE)
RIDDLE = re.compile(r"(What|Who|Whoever|Whose)\b")
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "ROADMAP.md", "CHANGELOG.md")


def _sources():
    return [path for path in tracked_files() if path.suffix == ".py" and path.is_relative_to(ROOT / "src")]


def _pages():
    return [ROOT / name for name in PAGES] + [
        path for path in tracked_files() if path.suffix == ".md" and "docs" in path.parts
    ]


def test_words_are_those_of_the_field():
    lines = (
        (path, number, line)
        for path in [*_sources(), *_pages()]
        for number, line in enumerate(path.read_text().splitlines(), 1)
    )
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}" for path, number, line in lines if DIALECT.search(line)
    ]
    assert not found


def test_docstrings_begin_with_a_noun_phrase_or_an_imperative():
    found = [
        f"{path.relative_to(ROOT)}: {docstring.splitlines()[0]}"
        for path in _sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (docstring := ast.get_docstring(node)) is not None
        and RIDDLE.match(docstring)
    ]
    assert not found


@pytest.mark.parametrize("text", ["Whoever casts", "as it comes", "What there is"])
def test_dialect_is_recognised(text):
    assert DIALECT.search(text)

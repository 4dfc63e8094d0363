"""The words of the source and the documents: those of the field, not a dialect of the project."""

import ast
import re

import pytest

from tests.policy.source_tree import ROOT, tracked_files

DIALECT = re.compile(
    r"\b(whoever|nobody|what there is|as it comes|it is none|taken apart|mend(s|ed|ing)?|hand(s|ed|ing)? on|looked at|"
    r"who (casts|computes|multiplie[sd]|reads|runs|writes))\b",
    re.IGNORECASE,
)
RIDDLE = re.compile(r"(What|Who|Whoever|Whose|To which|How many|How much)\b")
RIDDLE_IN_A_COMMENT = re.compile(r"\s*(#|//) " + RIDDLE.pattern)
ROOMS = ("src", "benchmarks", "scripts", "examples")
CODE = (".py", ".cpp", ".h", ".sh")
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "ROADMAP.md", "CHANGELOG.md")


def _sources(*suffixes):
    paths = [(path, path.relative_to(ROOT).parts[0]) for path in tracked_files()]
    return [path for path, room in paths if path.suffix in (suffixes or CODE) and room in ROOMS]


def _pages():
    return [ROOT / name for name in PAGES] + [
        path for path in tracked_files() if path.suffix == ".md" and "docs" in path.parts
    ]


def test_words_are_those_of_the_field():
    lines = (
        (path, number, line)
        for path in [ROOT / "Makefile", *_sources(), *_pages()]
        for number, line in enumerate(path.read_text().splitlines(), 1)
    )
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path, number, line in lines
        if DIALECT.search(line) or (path.suffix in CODE and RIDDLE_IN_A_COMMENT.match(line))
    ]
    assert not found


def test_docstrings_begin_with_a_noun_phrase_or_an_imperative():
    found = [
        f"{path.relative_to(ROOT)}: {docstring.splitlines()[0]}"
        for path in _sources(".py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (docstring := ast.get_docstring(node)) is not None
        and RIDDLE.match(docstring)
    ]
    assert not found


@pytest.mark.parametrize(
    "text", ["Whoever casts", "as it comes", "What there is", "handed on", "mends it", "Who multiplied"]
)
def test_dialect_is_recognised(text):
    assert DIALECT.search(text)

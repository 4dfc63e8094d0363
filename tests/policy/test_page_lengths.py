"""Pages of the documentation are short: words a page, a paragraph and a table cell, code not counted.

Pages that scripts/site_pages.py generates have no limit: a reader looks something up there.
"""

import re

import pytest

from tests.policy.source_tree import ROOT

PAGES = {str(page.relative_to(ROOT)): page for page in [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")]}
MOST_WORDS = {"page": 1200, "paragraph": 90, "cell": 25}
FENCE = re.compile(r"^```.*?^```\s*$", re.MULTILINE | re.DOTALL)
ITEM = re.compile(r"^\s*(?:[-*]|\d+\.) ")  # a list item is a paragraph of its own


def words(text):
    return len(re.sub(r"\]\([^)]*\)", "]", text).split())


def parts(text):
    """Paragraphs and table cells of a page, without code blocks."""
    paragraphs, cells = [""], []
    for line in FENCE.sub("", text).splitlines():
        if line.startswith("|"):
            cells += line.strip("|").split(" | ")
        elif not line.strip() or line.startswith("#"):
            paragraphs.append("")
        elif ITEM.match(line):
            paragraphs.append(line)
        else:
            paragraphs[-1] += " " + line
    return {"page": [FENCE.sub("", text)], "paragraph": paragraphs, "cell": cells}


@pytest.mark.parametrize("name", PAGES)
def test_page_is_short(name):
    long = {
        (kind, words(part), part.strip()[:60])
        for kind, of_kind in parts(PAGES[name].read_text()).items()
        for part in of_kind
        if words(part) > MOST_WORDS[kind]
    }
    assert not long


def test_readme_has_at_most_110_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


def test_parts_are_counted_apart():
    text = "one two\nthree\n\n- four five\n- six\n\n| a b | c |\n| --- | --- |\n\n```text\nseven eight\n```\n"
    counted = {kind: [words(part) for part in of_kind] for kind, of_kind in parts(text).items()}
    assert counted["page"] == [19]  # with the marks of tables and lists
    assert [number for number in counted["paragraph"] if number] == [3, 3, 2]
    assert counted["cell"][:2] == [2, 1]

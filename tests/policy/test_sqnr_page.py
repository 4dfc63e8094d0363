"""docs/reference/sqnr.md says what scripts/sqnr_table.py measures."""

import runpy
from pathlib import Path

import pytest

import octavo

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_page_is_what_the_script_writes():
    script = runpy.run_path(str(ROOT / "scripts" / "sqnr_table.py"))
    page = (ROOT / "docs" / "reference" / "sqnr.md").read_text(encoding="utf-8")
    assert not script["differs"](page, script["page"]())
    for name in octavo.recipes.names():
        assert page.count(f"| `{name}` |") == (0 if name == "bf16" else 2)
    changed = page.replace("| `rowwise` | 2", "| `rowwise` | 3")
    assert changed != page
    assert script["differs"](page, changed)

"""The site of the documentation: it builds with broken links as errors, and its pages pass scripts/check_pages.py.

Header, navigation and footer are the same on every page: a few pages are checked whole in all views, the others on a
dark phone, with the contrast of their own content.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
from filelock import FileLock

from scripts.check_pages import VIEWS, check_page
from tests.policy.source_tree import ROOT

pytestmark = pytest.mark.long

GENERATED = ["reference/api/octavo.nn.html", "reference/cli/train.html", "reference/configuration.html"]
WRITTEN = sorted(
    str(page.relative_to(ROOT / "docs").with_suffix(".html"))
    for page in (ROOT / "docs").rglob("*.md")
    if "decisions" not in page.parts
)
PARTS = 4  # of the written pages, so that workers share them


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Folder of the site, built once for all workers."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed to build the site")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "site"
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            build(folder)
    return folder


def build(folder):
    unfinished = folder.with_suffix(".unfinished")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(unfinished)]
    built = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    unfinished.rename(folder)


@pytest.fixture(scope="module")
def page(browser):
    """One page for all addresses, whose cache keeps the site's scripts and fonts."""
    pytest.importorskip("axe_playwright_python", reason="axe-core is not installed to measure contrast")
    return browser.new_page()


def faults(site, page, names, **settings):
    checks = [check_page(page, (site / name).as_uri(), name, **settings) for name in names]
    return [fault for check in checks for fault in check.faults(timed=False)]


def test_site_has_every_page_and_public_name(site):
    missing = [name for name in [*WRITTEN, *GENERATED] if not (site / name).exists()]
    assert not missing
    octavo = (site / "reference/api/octavo.html").read_text()
    assert 'id="octavo.convert"' in octavo
    assert "guard_save_pretrained" not in octavo  # the function, not the package of this name
    for name in ("compat.huggingface.FP8Callback", "compat.lightning.ScalingStateCallback", "text.tokens.prepare"):
        module = name.rpartition(".")[0]
        assert f'id="octavo.{name}"' in (site / f"reference/api/octavo.{module}.html").read_text()


@pytest.mark.parametrize("target", ["index.md", "nowhere.md", "index.md#nothing"])
def test_make_docs_fails_on_a_broken_link(target, tmp_path):
    """The Makefile's own command and the settings of mkdocs.yml, with one page."""
    for program in ("mkdocs", "material"):
        pytest.importorskip(program, reason=f"{program} is not installed to build the site")
    if shutil.which("make") is None:
        pytest.skip("there is no make on this machine")
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text(f"# Page\n\nA [link]({target}).\n")
    settings = {"INHERIT": str(ROOT / "mkdocs.yml"), "plugins": [], "hooks": [], "nav": ["index.md"], "not_in_nav": ""}
    (tmp_path / "mkdocs.yml").write_text(json.dumps(settings))
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    command = ["make", "--old-file=.venv/.installed", "docs"]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (made.returncode == 0) == (target == "index.md"), made.stdout + made.stderr
    assert target == "index.md" or target in made.stderr


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: f"{view[0]}-{view[1]}")
def test_pages_fit_are_legible_and_silent_in_every_view(site, page, view):
    assert faults(site, page, ["index.html", *GENERATED], views=[view]) == []


@pytest.mark.parametrize("part", range(PARTS))
def test_every_page_fits_is_legible_and_silent_on_a_dark_phone(site, page, part):
    assert faults(site, page, WRITTEN[part::PARTS], views=VIEWS[-1:], within=".md-content") == []


def test_search_finds_words_from_disk(site, browser):
    page = browser.new_page()
    page.goto((site / "how-to/install.html").as_uri())
    page.click("input.md-search__input")
    page.keyboard.type("stop_id")
    page.wait_for_selector(".md-search-result__item")
    found = page.eval_on_selector_all(".md-search-result__link", "links => links.map(link => link.href)")
    page.close()
    assert any("reference/api/octavo.rl.html" in link for link in found), found


SCHEME = """<!doctype html><html lang="en"><title>t</title><link rel="icon" href="data:,"><p>text</p><script>
localStorage.scheme ||= matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
console.log(localStorage.scheme);
</script></html>"""


def test_a_dark_view_is_dark_where_a_page_remembers_its_scheme(page, tmp_path):
    (tmp_path / "page.html").write_text(SCHEME)
    check = check_page(page, (tmp_path / "page.html").as_uri(), "page")
    assert check.console == [scheme for _, scheme in VIEWS]

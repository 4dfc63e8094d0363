"""The site of the documentation: it builds with broken links as errors, and its pages pass scripts/check_pages.py.

Header, navigation and footer are the same on every page: a few pages are checked whole in all views, the others on a
dark phone, with the contrast of their own content.
"""

import os
import subprocess
import sys

import pytest
from filelock import FileLock

from scripts.check_pages import VIEWS, check_page, served
from tests.policy.source_tree import ROOT

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
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(unfinished)]
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
    with served(site) as address:
        checks = [check_page(page, f"{address}/{name}", name, **settings) for name in names]
    return [fault for check in checks for fault in check.faults(timed=False)]


def test_site_has_every_page_and_public_name(site):
    missing = [name for name in [*WRITTEN, *GENERATED] if not (site / name).exists()]
    assert not missing
    assert 'id="octavo.convert"' in (site / "reference/api/octavo.html").read_text()


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: f"{view[0]}-{view[1]}")
def test_pages_fit_are_legible_and_silent_in_every_view(site, page, view):
    assert faults(site, page, ["index.html", *GENERATED], views=[view]) == []


@pytest.mark.parametrize("part", range(PARTS))
def test_every_page_fits_is_legible_and_silent_on_a_dark_phone(site, page, part):
    assert faults(site, page, WRITTEN[part::PARTS], views=VIEWS[-1:], within=".md-content") == []

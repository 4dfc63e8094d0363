"""The site of the documentation: it builds with broken links as errors, and its pages pass scripts/check_pages.py."""

import os
import subprocess
import sys

import pytest

from scripts.check_pages import VIEWS, check_page, served
from tests.policy.source_tree import ROOT

GENERATED = ["reference/api/octavo.nn.html", "reference/cli/train.html", "reference/configuration.html"]
WRITTEN = sorted(
    str(page.relative_to(ROOT / "docs").with_suffix(".html"))
    for page in (ROOT / "docs").rglob("*.md")
    if "decisions" not in page.parts
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="mkdocs is not installed to build the site")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_site_has_every_page_and_public_name(site):
    missing = [name for name in [*WRITTEN, *GENERATED] if not (site / name).exists()]
    assert not missing
    assert 'id="octavo.convert"' in (site / "reference/api/octavo.html").read_text()


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: f"{view[0]}-{view[1]}")
def test_pages_fit_are_legible_and_silent(site, browser, view):
    pages = [*WRITTEN, *GENERATED] if view == VIEWS[-1] else ["index.html", *GENERATED]
    with served(site) as address:
        checks = [check_page(browser, f"{address}/{name}", name, [view]) for name in pages]
    assert [fault for check in checks for fault in check.faults(timed=False)] == []

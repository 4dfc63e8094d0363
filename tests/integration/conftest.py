"""A browser for the tests of pages; where Chromium or Playwright is missing they skip and say so."""

from pathlib import Path

import pytest

from tests.chromium import CHROMIUM, FLAGS


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed to drive Chromium")
    with playwright.sync_playwright() as driver:
        own = driver.chromium.executable_path
        if CHROMIUM is None and not Path(own).exists():
            pytest.skip("no Chromium on this machine to open the page with, and Playwright has none of its own")
        chromium = driver.chromium.launch(executable_path=CHROMIUM or own, args=list(FLAGS))
        yield chromium
        chromium.close()

"""A browser for the tests of pages; where Chromium or Playwright is missing they skip and say so."""

from pathlib import Path

import pytest

from scripts.check_pages import check_page
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


@pytest.fixture
def page_faults(browser):
    """Returns what a file or an address misses of the limits of scripts/check_pages.py, in four views."""
    pytest.importorskip("axe_playwright_python", reason="axe-core is not installed to measure contrast")

    def faults(place):
        page = browser.new_page()
        check = check_page(page, place.as_uri() if isinstance(place, Path) else place, str(place))
        page.close()
        return check.faults(timed=False)

    return faults


@pytest.fixture
def open_page(browser):
    """Opens a file; at the end none may have complained, asked anybody for anything, or been too wide."""
    heard, pages = [], []

    def opened(path, *, width=1100):
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on("request", lambda request: heard.append(request.url) if request.url.startswith("http") else None)
        page.goto(path.as_uri())
        pages.append(page)
        return page

    yield opened
    widths = [(page.evaluate("document.documentElement.scrollWidth"), page.viewport_size["width"]) for page in pages]
    for page in pages:
        page.close()
    assert all(found <= window for found, window in widths)
    assert heard == []

"""Check HTML pages in Chromium: width, contrast, console, first paint and size, on a desk and a phone, light and dark.

    python -m scripts.check_pages build/site [runs/demo/report.html …] [--only PART]

Pages are opened from disk. Prints a row for each with the worst value of its four views, and exits with 1 if one misses
a limit:

| check        | limit                                                                  |
| ------------ | ---------------------------------------------------------------------- |
| overflow     | no page is wider than its window                                       |
| contrast     | axe-core's rule "color-contrast": 4.5 for text, 3 for large text        |
| console      | no message                                                             |
| first paint  | under 1 s                                                              |
| size         | under 1.5 MB, with what the page loads, without what pages share       |
"""

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.chromium import CHROMIUM, FLAGS

VIEWS = [(width, scheme) for width in (1280, 390) for scheme in ("light", "dark")]
LARGEST_MB = 1.5
LONGEST_PAINT_S = 1.0
SHARED = ("/plotly-", "/assets/", "search_index.js")
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
CONTRAST = """async (within) => {
  const options = { runOnly: ["color-contrast"], resultTypes: ["violations"], preload: false };
  return (await axe.run(within, options)).violations;
}"""
OVERFLOW = "document.documentElement.scrollWidth - window.innerWidth"


@dataclass(slots=True)
class PageCheck:
    """Measurements of one page, the worst of its views."""

    name: str
    overflow_px: int = 0
    paint_s: float = 0.0
    size_mb: float = 0.0
    contrast: list[str] = field(default_factory=list)
    console: list[str] = field(default_factory=list)

    def faults(self, *, timed: bool = True) -> list[str]:
        """Return a sentence for each missed limit."""
        faults = [f"{self.name}: {self.overflow_px} px wider than the window"] * (self.overflow_px > 0)
        faults += [f"{self.name}: paints after {self.paint_s:.2f} s"] * (timed and self.paint_s > LONGEST_PAINT_S)
        faults += [f"{self.name}: {self.size_mb:.2f} MB"] * (self.size_mb > LARGEST_MB)
        faults += [f"{self.name}: contrast: {text}" for text in self.contrast]
        return faults + [f"{self.name}: console: {text}" for text in self.console]


def check_page(
    page: Any, url: str, name: str, *, views: Sequence[tuple[int, str]] = tuple(VIEWS), within: str = "html"
) -> PageCheck:
    """Open an address in each view and measure it.

    Args:
        page: a browser's page; its cache is warm after the first view.
        url: an address over HTTP or of a file.
        name: name in the sentences about faults.
        views: widths and colour schemes.
        within: selector of the elements whose contrast is checked.
    """
    check = PageCheck(name)
    requests: list[Any] = []
    listeners = {
        "console": lambda message: check.console.append(message.text[:160]),
        "pageerror": lambda error: check.console.append(str(error)[:160]),
        "requestfinished": lambda request: requests.append(request),  # noqa: PLW0108 -- Playwright marks it
    }
    for event, listener in listeners.items():
        page.on(event, listener)
    for width, scheme in views:
        requests.clear()
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        page.goto(url)
        check.overflow_px = max(check.overflow_px, page.evaluate(OVERFLOW))
        check.paint_s = max(check.paint_s, page.evaluate(PAINT) / 1000)
        check.size_mb = max(check.size_mb, sum(map(_own_bytes, requests)) / 1e6)
        check.contrast += [f"{scheme}: {text}" for text in _contrast(page, within)]
        page.evaluate("localStorage.clear()")  # a theme keeps its first colour scheme there
    for event, listener in listeners.items():
        page.remove_listener(event, listener)
    return check


def _own_bytes(request: Any) -> int:
    """Bytes of a response, 0 for files that pages share."""
    if any(part in request.url for part in SHARED):
        return 0
    parts = urlsplit(request.url)
    if parts.scheme == "file":
        return Path(unquote(parts.path)).stat().st_size
    return int(request.sizes()["responseBodySize"])


def _contrast(page: Any, within: str) -> list[str]:
    """Elements whose text has too little contrast, each with axe-core's sentence."""
    from axe_playwright_python.sync_playwright import Axe

    page.evaluate(Axe().axe_script)
    return [
        f"{node['target'][0][-60:]} {node['any'][0]['message'][37:140]}"
        for rule in page.evaluate(CONTRAST, within)
        for node in rule["nodes"]
    ]


def pages_of(path: Path) -> list[Path]:
    """The pages in a folder, or the one page."""
    return sorted(page for page in path.rglob("*.html") if page.name != "404.html") if path.is_dir() else [path]


@contextmanager
def chromium() -> Iterator[Any]:
    """Chromium, driven by Playwright."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


def main() -> None:
    """Check the pages that the command line names and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, help="folders of pages, or pages")
    parser.add_argument("--only", default="", help="check pages whose name contains this")
    arguments = parser.parse_args()
    faults: list[str] = []
    print(f"{'page':60} {'overflow':>8} {'contrast':>8} {'console':>8} {'paint, s':>8} {'size, MB':>8}")
    with chromium() as browser:
        for place in itertools.chain.from_iterable(map(pages_of, arguments.paths)):
            name = str(place)
            if arguments.only not in name:
                continue
            page = browser.new_page()  # with a cold cache
            check = check_page(page, place.absolute().as_uri(), name)
            page.close()
            counts = f"{check.overflow_px:8} {len(check.contrast):8} {len(check.console):8}"
            print(f"{name[-60:]:60} {counts} {check.paint_s:8.2f} {check.size_mb:8.2f}", flush=True)
            faults += check.faults()
    print(*faults, sep="\n")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()

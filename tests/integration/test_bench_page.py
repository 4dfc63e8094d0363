"""The page of ``octavo bench serve`` in a real browser: a picture for every table, and nothing asked of anybody."""

import pytest

from octavo.bench.results import PartRecord, Report
from octavo.bench.serving import Workload, measured
from octavo.reports.benchmark import benchmark_page
from octavo.reports.rendering import write_page
from tests.unit.bench.serving.virtual_time import run, target


@pytest.fixture(scope="module")
def report():
    """Made before there is a browser, whose driver has this thread's event loop."""
    targets = {"bf16": target(0.2, weight_bytes=1000), "<fp8>": target(0.1, weight_bytes=540)}
    sections = run(measured(targets, Workload(batches=(1, 16), answer=4, prompt=8)))
    made = Report(facts={"device": "this"}, command="octavo bench serve", is_rehearsal=False, theme="serving")
    made.parts.append(PartRecord(name="serving", sections=sections))
    return made


@pytest.mark.long
def test_the_page_opens(report, tmp_path, open_page, page_faults):
    pytest.importorskip("plotly", reason="plotly is not installed")
    path = tmp_path / "serving.html"
    write_page(path, benchmark_page(report))
    opened = open_page(path)
    charts = sum(section.chart is not None for section in report.parts[0].sections)
    assert charts >= 4
    opened.wait_for_function(f"document.querySelectorAll('.plot .plot-container').length == {charts}")
    assert opened.locator("h1").inner_text() == "octavo serves"
    assert opened.locator("li.met, li.missed").count() == len(report.verdicts)
    assert opened.locator("tbody tr th", has_text="<fp8>").count() >= 5
    assert page_faults(path) == []

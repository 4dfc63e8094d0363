"""Studies' reports in a real browser: they draw their figures, pass the checks of pages, and are light or dark."""

import pytest

from octavo.experiments.presets import PRESETS
from octavo.reports.grid import grid_page
from octavo.reports.rendering import write_page
from octavo.reports.study import study_page
from tests.unit.experiments.test_grid_comparison import compared, result
from tests.unit.training.synthetic_study import study


@pytest.mark.long
def test_the_report_opens_in_light_and_dark(tmp_path, open_page, page_faults):
    path = tmp_path / "report.html"
    write_page(path, study_page(study()))
    page = open_page(path)
    curves, pairs, points = 3, 3, len(study().baseline.validation_curve)
    assert page.locator(".plot path.point").count() == (curves + pairs) * points
    shown = "getComputedStyle(document.querySelector('.plot .gridlayer path')).stroke"
    light = page.evaluate(shown)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"light => {shown} !== light", arg=light)
    assert page_faults(path) == []


@pytest.mark.long
def test_a_presets_page_says_what_became_of_its_claims(tmp_path, open_page, page_faults):
    losses = {"bf16": 4.0, "tensorwise": 4.001, "hopper": 4.03}
    results = [result(name, seed, nats + 0.01 * seed) for name, nats in losses.items() for seed in range(5)]
    path = tmp_path / "report.html"
    write_page(path, grid_page(compared(results), PRESETS["accumulation"], {"model": "a decoder", "seed": "0 to 4"}))
    page = open_page(path)
    assert page.locator("h1").inner_text() == "1 claim rerun: 1 confirmed"
    table = page.locator(".wide.layers")  # the verdicts, which no reader should have to scroll to
    assert table.evaluate("table => table.scrollWidth <= table.clientWidth")
    assert page_faults(path) == []


@pytest.mark.parametrize(
    ("losses", "seeds", "headline"),
    [
        ({"rowwise": 4.0, "mxfp8": 7.0}, 5, "1 of 2 variants end within 0.005 nats of bf16"),
        ({"mxfp8": 7.0}, 5, "0 of 1 variants end within"),
        ({"rowwise": 4.0}, 1, "One seed: gaps without intervals, and no verdict"),
    ],
)
def test_the_headline_counts_variants_that_diverged(losses, seeds, headline):
    runs = {"bf16": 4.0} | losses
    results = [result(name, seed, nats + 0.01 * seed) for name, nats in runs.items() for seed in range(seeds)]
    assert headline in grid_page(compared(results), None, {"model": "a decoder", "seed": "0 to 4"})

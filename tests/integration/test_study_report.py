"""The study's report in a real browser: it draws its figures, passes the checks of pages, and is light or dark."""

import pytest

from octavo.reports.rendering import write_page
from octavo.reports.study import study_page
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

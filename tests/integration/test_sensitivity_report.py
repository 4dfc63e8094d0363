"""The sensitivity page in a real browser: it draws its figures, complains of nothing and asks nobody for anything."""

import pytest

from octavo.quantization import Budget, measure_sensitivity
from octavo.reports.rendering import write_page
from octavo.reports.sensitivity import sensitivity_page
from tests.unit.quantization.sensitivity.small_models import small_llama, windows_of


@pytest.mark.long
@pytest.mark.parametrize("budget", [Budget(perplexity=0.05, bytes_share=0.6), Budget(bytes_share=0.1)])
def test_the_page_opens(budget, tmp_path, open_page, page_faults):
    model = small_llama()
    windows = windows_of(model, 4)
    found = measure_sensitivity(model, windows[:2], windows[2:], budget=budget, true_pairs=4)
    path = tmp_path / "report.html"
    write_page(path, sensitivity_page(found, {"model": "<b>small</b>"}))
    page = open_page(path)
    figures = 3 + (found.best is not None)
    page.wait_for_function(f"document.querySelectorAll('.plot .main-svg').length >= {figures}")
    assert page.locator("tbody tr").count() == len(found.units)
    assert page.locator("dd").first.inner_text() == "<b>small</b>"
    assert page_faults(path) == []

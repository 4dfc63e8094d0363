"""The report without a browser: complete, escaped, and offline."""

import re

import pytest
from plotly.offline import get_plotlyjs_version

from octavo.reports.study import study_page
from octavo.training import study_table
from octavo.training.comparison import GAP_BAR_NATS
from tests.unit.training.synthetic_study import run, study


@pytest.fixture(scope="module")
def page():
    return study_page(study())


def without_scripts(page):
    return re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def test_page_shows_verdict_table_facts_and_text(page):
    text = without_scripts(page)
    assert study_table.verdict(study()) in text
    assert all(row.name in text for row in study_table.rows(study(), "cpu"))
    assert "emulated" in text
    assert "2.1 M parameters" in text


@pytest.mark.parametrize(("device", "difference"), [("cpu", "–"), ("cuda", "+14.3 %")])
def test_page_compares_peak_memory_on_a_gpu(device, difference):
    runs = (run("fp32", 0.0), run("bf16", 0.0), run("tensorwise", 0.0, peak_memory_bytes=800 << 20))
    text = without_scripts(study_page(study(*runs), device=device))
    assert f'<td data-label="FP8 tensorwise">800</td><td data-label="FP8 vs BF16">{difference}</td>' in text


def test_text_from_outside_is_escaped(page):
    text = without_scripts(page)
    assert "a &lt;synthetic&gt; text" in text
    assert "&lt;0&gt; &amp; run(argv)" in text
    assert "<0>" not in text


def test_page_asks_nothing_of_the_network(page):
    text = without_scripts(page)
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", text)
    assert re.findall(r'<script src="(.*?)"', page) == [f"plotly-{get_plotlyjs_version()}.min.js"]
    assert "@import" not in text


def test_the_gap_bar_is_drawn(page):
    assert f"bar: +{GAP_BAR_NATS:.4f}" in page


def test_one_run_makes_a_page_too():
    assert "One run has no gap" in study_page(study(run("fp32", 0.0)))


def test_the_page_says_why_speeds_are_not_compared():
    unlike = study(run("fp32", 0.0), run("bf16", 0.0, threads=(1,)))
    assert str(study_table.threads_note(unlike, "cpu")) in study_page(unlike)

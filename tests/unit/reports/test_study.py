"""The report: complete, self-contained, escaped, and free of script errors in a real browser where there is one."""

import re
import subprocess

import pytest

from octavo.reports.study import study_page
from octavo.training import study_table
from octavo.training.comparison import GAP_BAR_NATS
from tests.chromium import CHROMIUM, FLAGS
from tests.unit.training.synthetic_study import run, study

QUIET = ["--headless", *FLAGS, "--enable-logging=stderr"]


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
    assert not re.findall(r"<script[^>]+src=", page)
    assert "@import" not in text


def test_the_gap_bar_is_drawn(page):
    assert f"bar: +{GAP_BAR_NATS:.4f}" in page


def test_one_run_makes_a_page_too():
    assert "One run has no gap" in study_page(study(run("fp32", 0.0)))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine to open the report with")
def test_a_browser_draws_both_figures_without_console_errors(page, tmp_path):
    (tmp_path / "report.html").write_text(page)
    flags = [*QUIET, f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--dump-dom"]
    command = [str(CHROMIUM), *flags, f"file://{tmp_path}/report.html"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    assert [line for line in result.stderr.splitlines() if "CONSOLE" in line] == []
    curves, pairs, points = 3, 3, len(study().baseline.validation_curve)
    assert result.stdout.count('<path class="point') == (curves + pairs) * points


def test_the_page_says_why_speeds_are_not_compared():
    unlike = study(run("fp32", 0.0), run("bf16", 0.0, threads=(1,)))
    assert str(study_table.threads_note(unlike, "cpu")) in study_page(unlike)

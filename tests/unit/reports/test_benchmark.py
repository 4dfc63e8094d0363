"""The benchmark's page: complete, escaped and offline."""

import sys

import pytest

from octavo.errors import ConfigError
from octavo.reports.benchmark import benchmark_page
from tests.unit.bench.test_results import report

__all__ = ["report"]  # a fixture


def test_the_page_holds_everything_and_loads_nothing(report):
    html = benchmark_page(report)
    assert "a &lt;cast&gt;" in html
    assert "BackendError: no" in html
    assert 'src="http' not in html
    assert [html.count(f'<li class="{word}">') for word in ("met", "missed", "not-judged")] == [1, 1, 1]
    assert html.count('<div data-figure="') == 1


def test_without_plotly_the_page_is_refused_with_what_to_do(report, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ConfigError, match=r"--from RESULT\.json"):
        benchmark_page(report)

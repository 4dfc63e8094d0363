"""The page of a plan: bars and cells against the plan's seconds and the request."""

import json
from html.parser import HTMLParser
from typing import Any

import pytest

from octavo.planning import PlanRequest, find_hardware, find_model, fitted_constants, make_plan
from octavo.planning.constants import WORK
from octavo.reports.plan import MEMORY, plan_page

GPUS, TOKENS, PRICE, WATTS = 64, 2e12, 2.5, 700


class Page(HTMLParser):
    """Figures, and the text of table cells by row."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.figures: list[Any] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        figure = dict(attrs).get("data-figure")
        if figure:
            self.figures.append(json.loads(figure)["data"])
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.rows:
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.strip()


def page_of(**settings: Any) -> tuple[Any, Page]:
    request = PlanRequest(model=find_model("llama-3-8b"), hardware=find_hardware("h100"), gpus=GPUS, **settings)
    plan = make_plan(request, fitted_constants())
    return plan, Page(plan_page(plan))


@pytest.fixture(scope="module")
def shown() -> tuple[Any, Page]:
    return page_of(tokens=TOKENS, price=PRICE)


def number(text: str) -> float:
    return float(text.replace(",", "").split()[0])


def test_bars_of_a_recipe_are_as_long_as_its_step(shown):
    plan, page = shown
    steps = {option.name: option.candidate.seconds["total"] for option in plan.options if option.candidate}
    lengths = dict.fromkeys(steps, 0.0)
    for trace in page.figures[0]:
        for name, value in zip(trace["y"], trace["x"], strict=True):
            lengths[name] += value
    assert lengths == pytest.approx(steps)


def test_blocks_of_the_flame_graph_are_as_long_as_the_step(shown):
    plan, page = shown
    steps = [plan.bf16.seconds["total"], plan.best_fp8.candidate.seconds["total"]]
    assert [sum(trace["values"]) for trace in page.figures[1]] == pytest.approx(steps)


def test_bars_of_layers_are_their_seconds(shown):
    plan, page = shown
    lengths = {"bf16": 0.0, plan.best_fp8.name: 0.0}
    for trace in page.figures[2]:
        for name, value in zip(trace["y"], trace["x"], strict=True):
            lengths[name] += value
    seconds = [sum(getattr(layer, name) for layer in plan.layers) for name in ("bf16", "fp8")]
    assert list(lengths.values()) == pytest.approx(seconds)


def test_days_cost_and_energy_of_the_page_follow_from_its_rates(shown):
    """All from the page's own text and the request, to the three digits that are shown."""
    _, page = shown
    assert "2,000 billion tokens" in page.text
    assert f"{PRICE:g} per GPU-hour" in page.text
    head = next(row for row in page.rows if row[:1] == ["recipe"])
    rows = [dict(zip(head, row, strict=True)) for row in page.rows if len(row) == len(head) and row != head]
    assert {row["recipe"] for row in rows} >= {"bf16", "tensorwise", "rowwise", "blockwise"}
    for row in rows:
        days = TOKENS / number(row["tokens/s/GPU"]) / GPUS / 86400
        assert number(row["days"]) == pytest.approx(days, rel=0.006)
        assert number(row["cost"]) == pytest.approx(days * 24 * GPUS * PRICE, rel=0.001)
        assert number(row["MWh"]) == pytest.approx(days * 24 * GPUS * WATTS / 1e6, rel=0.006)
        assert "recompute" in row["layout"]


def test_a_page_without_a_price_has_no_cost():
    _, page = page_of()
    head = next(row for row in page.rows if row[:1] == ["recipe"])
    assert "MWh" in head
    assert "cost" not in head
    assert "GPU-hour" not in page.text


def test_legend_and_memory_are_in_plain_words(shown):
    _, page = shown
    assert [word for word in (*WORK.values(), *MEMORY.values()) if word not in page.text] == []


def test_the_page_says_of_which_peak_mfu_is_a_share(shown):
    """A row's rate, times FLOPs a token, over its MFU: the peak that the page names, and H100's in BF16."""
    _, page = shown
    assert "as a share of the BF16 peak of 989.4 TFLOP/s, in FP8 recipes too" in page.text
    head = next(row for row in page.rows if row[:1] == ["recipe"])
    rows = [dict(zip(head, row, strict=True)) for row in page.rows if len(row) == len(head) and row != head]
    flops = 6 * (8_030_261_248 - 128_256 * 4096) + 12 * 4096 * 4096 * 32  # causal attention to 4,096 tokens in the mean
    for row in rows:
        assert number(row["tokens/s/GPU"]) * flops / 989.4e12 == pytest.approx(
            number(row["MFU"].rstrip("%")) / 100, abs=0.006
        )

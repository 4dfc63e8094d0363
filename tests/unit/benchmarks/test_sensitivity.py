"""The verdict on the best mix, judged on made-up figures; the model itself is not run here."""

import math
from dataclasses import replace

import pytest

from benchmarks import sensitivity
from octavo.quantization.sensitivity import Budget, Found, Increase, Sensitivity, measure_sensitivity
from tests.unit.quantization.sensitivity.small_models import small_llama, windows_of


@pytest.fixture(scope="module")
def found() -> Sensitivity:
    model = small_llama()
    budget = Budget(perplexity=sensitivity.PERPLEXITY, bytes_share=sensitivity.BYTES)
    return measure_sensitivity(model, windows_of(model, 2), windows_of(model, 2, seed=1), budget=budget, true_pairs=0)


def with_best(found: Sensitivity, *, percent: float, share: float) -> Sensitivity:
    nats = math.log1p(percent / 100)
    true = Increase(nats=nats, error=0.001, divergence=0.01, windows=40)
    made = Found(name="budget", chosen={}, bytes=1, bytes_share=share, fp8_products=0.25, predicted=nats, verified=true)
    return replace(found, best=made)


@pytest.mark.parametrize(
    ("percent", "share", "outcome"),
    [(0.99, 0.6, "met"), (1.01, 0.55, "missed"), (0.5, 0.601, "missed"), (-0.2, 0.55, "met")],
)
def test_both_bars_count(found, percent, share, outcome):
    row = list(sensitivity.table(with_best(found, percent=percent, share=share)))[2]
    assert row.startswith(f"| best within 1.0 % and 0.60 | {share:.4f} | 25% |")
    assert f"| {percent:+.2f}% |" in row
    assert row.endswith(f"| {outcome} |")


def test_no_mix_is_a_miss(found):
    without = replace(found, best=None)
    assert not any("best within" in line for line in sensitivity.table(without))
    assert "No mix was within both budgets on the windows it was chosen on: missed." in sensitivity.notes(without, 1.0)
    assert any("ranked by an estimate" in line for line in sensitivity.notes(found, 1.0))


def test_the_others_stand_beside_it_without_a_verdict(found):
    rows = list(sensitivity.table(with_best(found, percent=0.5, share=0.55)))[3:]
    assert len(rows) == len(found.front) + len(found.presets)
    assert all(row.endswith("| – |") for row in rows)

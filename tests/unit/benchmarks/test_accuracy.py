"""What the accuracy benchmark says of gaps that are known."""

import math

import pytest

from benchmarks.accuracy import verdict_lines

BASE = [4.19, 4.16, 4.21]


def test_the_paired_error_comes_first_then_the_bar_then_the_spread():
    gaps = [0.0090, 0.0040, 0.0032]
    mean = sum(gaps) / 3
    error = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / 2 / 3)
    paired, bar, spread = verdict_lines("tensorwise", gaps, BASE)
    assert f"mean gap {mean:+.4f} ± {error:.4f} nats" in paired
    assert "over 3 seeds" in paired
    assert bar == f"- bar of 0.0050 nats: missed; the mean lies {mean - 0.005:.4f} ± {error:.4f} above it"
    assert "between 4.1600 and 4.2100 nats over the seeds, a spread of 0.0500" in spread
    assert "inside it, which says nothing about the bar" in spread
    assert "met" not in spread


@pytest.mark.parametrize(
    ("gaps", "outcome", "where"), [([0.004] * 2, "met", "inside"), ([0.1] * 2, "missed", "outside")]
)
def test_outcome_and_spread_are_judged_apart(gaps, outcome, where):
    _, bar, spread = verdict_lines("rowwise", gaps, BASE)
    assert f"nats: {outcome};" in bar
    assert f"the gap lies {where} it" in spread


def test_one_seed_has_no_error():
    assert "± nan" in verdict_lines("tensorwise", [0.001], BASE[:1])[0]

"""The learning-rate curve at the points that define it."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.training.schedules import adjust_for_fp8, learning_rate


def rate(step, *, warmup=10, steps=110):
    return learning_rate(step, peak=2.0, floor=0.5, warmup=warmup, steps=steps)


def test_warmup_is_a_straight_line_to_the_peak():
    assert [rate(step) for step in (1, 5, 10)] == [0.2, 1.0, 2.0]


def test_cosine_by_its_quarters():
    # cos(π/4) down from the middle (2 + 0.5) / 2, half the span 0.75 wide.
    assert rate(60) == pytest.approx(1.25)
    assert rate(35) == pytest.approx(1.25 + 0.75 * math.sqrt(0.5))
    assert rate(85) == pytest.approx(1.25 - 0.75 * math.sqrt(0.5))
    assert rate(110) == pytest.approx(0.5)


def test_without_warmup_and_past_the_end():
    assert rate(1, warmup=0, steps=1) == 0.5
    assert rate(500) == pytest.approx(0.5)
    assert rate(3, warmup=5, steps=3) == pytest.approx(1.2)


@given(st.integers(0, 50), st.integers(1, 200))
def test_rises_then_falls_within_its_bounds(warmup, steps):
    rates = [rate(step, warmup=warmup, steps=steps) for step in range(1, steps + 1)]
    assert all(0 < value <= 2.0 for value in rates)
    top = min(warmup, steps)
    assert all(a < b for a, b in pairwise(rates[:top]))
    assert all(a >= b for a, b in pairwise(rates[top:]))


def test_the_heuristic():
    lr, warmup = adjust_for_fp8(3e-4, 2000)
    assert lr == pytest.approx(2.55e-4)
    assert warmup == 3000

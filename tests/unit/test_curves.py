"""Curves: what smoothing, comparing and thinning keep."""

import math

import pytest

from octavo.curves import smoothed, thinned


def test_smoothing_is_the_weighted_mean_of_what_came_before():
    curve = tuple((step, float(step**2)) for step in range(6))
    keep = 1 - 2 / (3 + 1)
    for index, (_, value) in enumerate(smoothed(curve, 3)):
        weights = [keep ** (index - i) for i in range(index + 1)]
        mean = sum(w * curve[i][1] for i, w in enumerate(weights)) / sum(weights)
        assert value == pytest.approx(mean)


def test_a_value_that_broke_does_not_spoil_the_mean_after_it():
    whole = smoothed(((0, 4.0), (2, 2.0)), 5)
    broken = smoothed(((0, 4.0), (1, math.nan), (2, 2.0)), 5)
    assert math.isnan(broken[1][1])
    assert (broken[0], broken[2]) == whole


def test_thinning_keeps_every_spike():
    curve = tuple((step, 1.0 + (step % 7) / 100) for step in range(10_000))
    curve = tuple((step, 50.0 if step == 4321 else -50.0 if step == 8765 else value) for step, value in curve)
    few = thinned(curve, 500)
    assert len(few) <= 500
    assert {(4321, 50.0), (8765, -50.0)} <= set(few)
    assert list(few) == sorted(few)


def test_thinning_keeps_a_value_that_broke():
    curve = tuple((step, math.nan if step == 77 else 1.0) for step in range(1000))
    assert any(math.isnan(value) for _, value in thinned(curve, 10))

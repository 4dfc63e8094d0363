"""Sliding means and medians against numpy's own, window by window."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.doctor.sliding import sliding_means, sliding_medians

NUMBERS = st.floats(-1e6, 1e6) | st.sampled_from([0.0, 1.0, 1.5])  # equal ones among them


def windows(values, window):
    return np.lib.stride_tricks.sliding_window_view(values, window)


@given(st.lists(NUMBERS, min_size=1, max_size=70), st.data())
def test_each_median_is_numpys_to_the_last_bit(numbers, data):
    values = np.array(numbers)
    window = data.draw(st.integers(1, len(values)))
    np.testing.assert_array_equal(sliding_medians(values, window), np.median(windows(values, window), axis=1))


@given(st.lists(NUMBERS, min_size=1, max_size=70), st.data())
def test_each_mean_is_that_of_its_window(numbers, data):
    values = np.array(numbers)
    window = data.draw(st.integers(1, len(values)))
    expected = windows(values, window).mean(axis=1)
    np.testing.assert_allclose(sliding_means(values, window), expected, rtol=1e-12, atol=1e-12 * np.abs(values).max())


@pytest.mark.parametrize("of", [sliding_means, sliding_medians])
def test_memory_does_not_depend_on_the_window(of):
    values = np.random.default_rng(0).normal(size=20_000)
    tracemalloc.start()
    of(values, 2000)
    assert tracemalloc.get_traced_memory()[1] < 20 * values.nbytes, "a window's copies would be 1800 times as large"
    tracemalloc.stop()

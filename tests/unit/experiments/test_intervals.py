"""Intervals against scipy's, against sums written out, and against known gaps in simulated studies."""

import itertools
import math
import statistics

import numpy as np
import pytest
from scipy import stats

from octavo.experiments.intervals import (
    holm,
    paired_interval,
    paired_p_value,
    seeds_needed,
    slope,
    student_interval,
)


def written_out(table):
    """The two-way layout's variance and Satterthwaite's degrees of freedom, in loops over lists."""
    seeds, windows = len(table), len(table[0])
    mean = statistics.fmean(itertools.chain.from_iterable(table))
    rows = [statistics.fmean(row) for row in table]
    columns = [statistics.fmean(column) for column in zip(*table, strict=True)]
    by_seed = windows * sum((row - mean) ** 2 for row in rows) / (seeds - 1)
    by_window = seeds * sum((column - mean) ** 2 for column in columns) / (windows - 1)
    cells = itertools.product(range(seeds), range(windows))
    rest = sum((table[s][w] - rows[s] - columns[w] + mean) ** 2 for s, w in cells) / ((seeds - 1) * (windows - 1))
    total = by_seed + by_window - rest
    freedom = total**2 / (
        by_seed**2 / (seeds - 1) + by_window**2 / (windows - 1) + rest**2 / ((seeds - 1) * (windows - 1))
    )
    return mean, math.sqrt(total / (seeds * windows)), freedom


def test_both_effects_make_the_error():
    random = np.random.default_rng(1)
    table = (
        0.1 * random.standard_normal((5, 1)) + 0.2 * random.standard_normal((1, 40)) + random.standard_normal((5, 40))
    )
    table += 3 * np.arange(5)[:, None] * 0.05
    interval = paired_interval(table)
    mean, error, freedom = written_out(table.tolist())
    assert (interval.estimate, interval.error, interval.freedom) == pytest.approx((mean, error, freedom))
    bound = stats.t.ppf(0.975, freedom) * error
    assert (interval.low, interval.high) == pytest.approx((mean - bound, mean + bound))


def test_few_seeds_are_never_surer_than_their_means():
    """Of two to four seeds the wider interval: means that agree by chance would else leave the windows' freedom."""
    random, wider = np.random.default_rng(7), 0
    for seeds in (2, 3, 4):
        for _ in range(50):
            table = random.standard_normal((seeds, 40)) + 0.2 * random.standard_normal((1, 40))
            by_seed = student_interval(table.mean(axis=1))
            interval = paired_interval(table)
            assert interval.half_width >= by_seed.half_width
            wider += interval == by_seed
    assert 0 < wider < 150


def test_seven_equal_recipes_get_a_false_order_in_at_most_one_study_of_twenty():
    """Holm over 21 pairs of five seeds, whose effect is as small as the real runs'; 300 studies, so up to 7.5 %."""
    random, false = np.random.default_rng(8), 0
    for _ in range(300):
        runs = 0.0014 * random.standard_normal((7, 5, 1)) + 0.023 * random.standard_normal((7, 5, 100))
        pairs = itertools.combinations(range(7), 2)
        p_values = holm({f"{one} {other}": paired_p_value(runs[one] - runs[other]) for one, other in pairs})
        false += min(p_values.values()) < 0.05
    assert false / 300 <= 0.075


@pytest.mark.parametrize("of_window", [0.0, 0.05])
def test_a_p_value_is_the_larger_one_and_may_be_of_another_truth(of_window):
    """By the means of seeds, or where windows have an effect by both."""
    random = np.random.default_rng(9)
    table = 0.02 + random.standard_normal((6, 30)) * 0.01 + of_window * random.standard_normal((1, 30))
    by_seed = stats.ttest_1samp(table.mean(axis=1), 0.015).pvalue
    shifted = paired_interval(table - 0.015).p_value
    assert (shifted > by_seed) == (of_window > 0)
    assert paired_p_value(table, 0.015) == pytest.approx(max(by_seed, shifted))


@pytest.mark.parametrize("shape", [(1, 12), (12, 1)])
def test_one_seed_or_one_window_gives_the_interval_of_student(shape):
    values = np.random.default_rng(2).standard_normal(12)
    interval = paired_interval(values.reshape(shape))
    expected = stats.ttest_1samp(values, 0)
    low, high = expected.confidence_interval(0.95)
    assert (interval.low, interval.high, interval.p_value) == pytest.approx((low, high, expected.pvalue))
    assert interval.p_above_zero == pytest.approx(stats.ttest_1samp(values, 0, alternative="greater").pvalue)


def test_equal_runs_have_an_interval_of_no_width():
    interval = paired_interval(np.zeros((3, 4)))
    assert (interval.low, interval.high, interval.p_value) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("table", [[], [1.0, 2.0], [[]], [[1.0, math.nan]], [[math.inf]]])
def test_what_is_no_table_of_numbers_is_refused(table):
    with pytest.raises(ValueError, match="differences must be finite numbers of shape"):
        paired_interval(table)


def test_a_single_number_has_no_interval():
    assert math.isnan(student_interval([1.0]).error)


@pytest.mark.long
@pytest.mark.parametrize(
    ("seeds", "windows", "of_seed", "of_window"),
    [
        *[(5, 200, 0.003, 0.01), (8, 200, 0.003, 0.01), (5, 100, 0.001, 0.02), (8, 100, 0.0, 0.02)],
        *[(3, 100, 0.004, 0.0), (2, 100, 0.003, 0.0), (3, 100, 0.003, 0.0)],
    ],
)
def test_95_percent_intervals_hold_a_known_gap_in_93_to_97_percent_of_studies(seeds, windows, of_seed, of_window):
    """2,000 studies each: effects of seeds normal, those of windows with Student's heavy tails. Few seeds hold more."""
    random, gap, held = np.random.default_rng(3), 0.004, 0
    for _ in range(2000):
        table = gap + 0.02 * random.standard_normal((seeds, windows))
        table += of_seed * random.standard_normal((seeds, 1)) + of_window * random.standard_t(6, (1, windows))
        interval = paired_interval(table)
        held += interval.low <= gap <= interval.high
    assert 0.93 <= held / 2000 <= (0.97 if seeds >= 5 else 0.985)


def test_holm_rejects_as_step_down_does():
    """Sorted p-values are compared with 0.05 / (tests that are left), until one is above."""
    random = np.random.default_rng(4)
    for _ in range(200):
        p_values = {str(key): p for key, p in enumerate(random.uniform(0, 0.05, 6))}
        rejected = set()
        for left, key in zip(range(6, 0, -1), sorted(p_values, key=p_values.__getitem__), strict=True):
            if p_values[key] > 0.05 / left:
                break
            rejected.add(key)
        adjusted = holm(p_values)
        assert {key for key, p in adjusted.items() if p <= 0.05} == rejected


@pytest.mark.parametrize(
    ("spread", "difference"), [(0.005, 0.005), (0.01, 0.005), (0.002, 0.005), (0.0008, 0.005), (0.00092, 0.005)]
)
def test_the_number_of_seeds_sees_the_difference_in_four_of_five_studies(spread, difference):
    random = np.random.default_rng(5)

    def seen(seeds):
        studies = difference + spread * random.standard_normal((4000, seeds))
        return np.mean(stats.ttest_1samp(studies, 0, axis=1).pvalue < 0.05)

    needed = seeds_needed(spread, difference)
    assert seen(needed) >= 0.78
    assert needed == 2 or seen(needed - 1) < 0.82


def test_more_spread_never_needs_fewer_seeds():
    needed = [seeds_needed(spread, 0.005) for spread in np.geomspace(1e-6, 0.5, 300)]
    assert needed == sorted(needed)
    assert needed[0] == 2


def test_tests_without_a_p_value_count():
    assert holm({"a": 0.01, "b": 0.02}, tests=5) == {"a": 0.05, "b": 0.08}


def test_a_slope_is_that_of_least_squares():
    random = np.random.default_rng(6)
    steps, values = np.arange(12) * 50.0, random.standard_normal(12)
    assert slope(steps, values) == pytest.approx(np.polyfit(steps, values, 1)[0])
    with pytest.raises(ValueError, match="two different steps"):
        slope([3, 3], [1.0, 2.0])

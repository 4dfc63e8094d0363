"""Spearman's rank correlation, of what can be told from the floor."""

import math
import random

import pytest

from octavo.quantization.sensitivity.ablation import Increase
from octavo.quantization.sensitivity.ranking import agreement_of


def of(divergence):
    return Increase(nats=0, error=0, divergence=divergence, windows=2)


def agreement(guessed, true, floor=0.0):
    keys = [(str(index), "rowwise") for index in range(len(guessed))]
    return agreement_of(dict(zip(keys, guessed, strict=True)), dict(zip(keys, map(of, true), strict=True)), of(floor))


def test_without_ties_it_is_the_textbooks_formula():
    generator = random.Random(0)
    for count in (3, 4, 10):
        guessed, true = (generator.sample(range(1, 100), count) for _ in range(2))
        ranks = [[sorted(values).index(value) for value in values] for values in (guessed, true)]
        squares = sum((a - b) ** 2 for a, b in zip(*ranks, strict=True))
        found = agreement(guessed, true)
        assert found.rank_correlation == pytest.approx(1 - 6 * squares / (count * (count**2 - 1)))
        assert found.pairs == count
    assert agreement([1.0, 2.0, 3.0, 4.0], [40.0, 30.0, 20.0, 10.0]).rank_correlation == pytest.approx(-1)


def test_equal_values_share_their_rank():
    """Ranks 0, 1.5, 1.5, 3 beside 0, 1, 2, 3: a covariance of 4.5 over the root of 4.5 * 5. Turned round, the same."""
    expected = 4.5 / math.sqrt(4.5 * 5)
    assert agreement([1.0, 2.0, 2.0, 4.0], [1.0, 2.0, 3.0, 4.0]).rank_correlation == pytest.approx(expected)
    assert agreement([1.0, 2.0, 2.0, 4.0], [1.0, 3.0, 2.0, 4.0]).rank_correlation == pytest.approx(expected)
    assert agreement([1.0, 2.0, 3.0, 4.0], [5.0, 5.0, 5.0, 5.0]).pairs == 4
    assert math.isnan(agreement([1.0, 2.0, 3.0, 4.0], [5.0, 5.0, 5.0, 5.0]).rank_correlation)


def test_values_below_the_floor_do_not_count_as_ordered_pairs():
    falling = [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    nothing = agreement([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], falling, floor=10.0)
    assert nothing.pairs == 0
    assert math.isnan(nothing.rank_correlation)
    some = agreement([9.0, 1.0, 2.0, 3.0], [0.5, 2.0, 3.0, 4.0], floor=1.0)
    assert (some.rank_correlation, some.pairs) == (pytest.approx(1.0), 3)
    two = agreement([1.0, 2.0, 3.0], [0.1, 2.0, 3.0], floor=1.0)
    assert two.pairs == 2
    assert math.isnan(two.rank_correlation)

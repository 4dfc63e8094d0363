"""Gradients that DDP and FSDP2 send as codes, on three ranks with gloo between them.

Averages against what one process computes of the same gradients with ``octavo.quantize``, bit for bit.
"""

from typing import Any

import pytest

from tests.contract.rank_processes import of_check, results_of_ranks, shared_folder

RANKS = 3


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, Any]]:
    """What each rank returned, by check."""
    return results_of_ranks("tests.contract.gradients_program", shared_folder(tmp_path_factory, "gradients"), RANKS)


@pytest.mark.long
@pytest.mark.parametrize("check", ["replicated", "sharded"])
def test_averages_are_those_of_the_codes(found, check):
    """Uneven, padded and empty chunks."""
    assert of_check(found, check) == [[]] * RANKS


@pytest.mark.long
def test_bytes_are_half_of_bfloat16s(found):
    for ratios in of_check(found, "traffic"):
        assert all(0.5 < ratio <= 0.516 for ratio in ratios), ratios


def test_gradients_of_many_buckets_are_rounded_twice(found):
    """A Gaussian gradient's error is 0.026 a rounding; these are less even, and none is a mere cast to bfloat16."""
    for worst in of_check(found, "many_layers"):
        assert 0.01 < worst < 0.05


@pytest.mark.parametrize("check", ["feedback", "feedback_of_buckets"])
def test_errors_add_up_over_steps_unless_they_are_fed_back(found, check):
    for without, with_feedback in of_check(found, check):
        assert without > 15
        assert with_feedback < 2


def test_an_overflow_on_one_rank_reaches_all_and_ends_with_its_step(found):
    assert of_check(found, "overflow") == [[33, 0]] * RANKS


def test_statistics_are_those_of_what_a_rank_sends(found):
    for statistics, error, zeros, after in of_check(found, "measured"):
        assert statistics == {"gradient_error": pytest.approx(error), "gradient_underflow": pytest.approx(zeros)}
        assert 0 < zeros < 1
        assert after == {}


def test_what_is_refused_says_what_to_do(found):
    for plain, feedback, fmt in of_check(found, "refusals"):
        assert "wrap it first" in plain
        assert "train with DDP" in feedback
        assert "octavo.E4M3" in fmt

"""Contestants in turn, and their ratios."""

import gc

import pytest

from octavo.bench.timing import interleaved, ratio, wall_clock


@pytest.mark.long
def test_every_round_runs_each_once_in_turn_after_the_warm_up():
    ran: list[str] = []
    clock = iter(range(1, 100))

    def timed(run):
        run()
        return float(next(clock))

    seconds = interleaved({"a": lambda: ran.append("a"), "b": lambda: ran.append("b")}, rounds=3, clock=timed)
    assert ran == ["a", "b"] * 4
    assert seconds == {"a": [1.0, 3.0, 5.0], "b": [2.0, 4.0, 6.0]}
    assert gc.isenabled()


@pytest.mark.long
@pytest.mark.parametrize(("late_after", "rounds"), [(0, 3), (4, 4), (100, 6)])
def test_at_least_three_rounds_are_run(late_after, rounds):
    done: list[int] = []
    seconds = interleaved({"a": lambda: done.append(1)}, rounds=6, warmup=0, is_late=lambda: len(done) >= late_after)
    assert len(seconds["a"]) == len(done) == rounds


def test_garbage_collection_is_restored_after_an_error():
    with pytest.raises(ZeroDivisionError):
        interleaved({"a": lambda: 1 / 0}, rounds=1, warmup=0)
    assert gc.isenabled()


def test_a_ratio_is_the_median_of_the_rounds_and_not_of_the_sums():
    seconds = {"own": [2.0, 30.0, 4.0], "other": [1.0, 10.0, 1.0]}
    assert ratio(seconds, "own", "other").median == 3.0
    assert str(ratio(seconds, "own", "other")) == "3.00 (2.00–4.00)"


def test_the_wall_clock_runs_it_once():
    ran: list[int] = []
    assert wall_clock(lambda: ran.append(1)) >= 0
    assert ran == [1]

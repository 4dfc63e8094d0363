"""The simulated step of many ranks, against times that can be added up by hand."""

import pytest

from benchmarks.scaling_simulation import Network, TrainingStep, Work, simulate

NETWORK = Network(latency=1.0, reduce_latency=2.0, bandwidth=4.0)
FREE = Network(latency=0.0, reduce_latency=0.0, bandwidth=float("inf"))


def step(**changes):
    return TrainingStep(**{"layers": 4, "forward": 100.0, "weights": 8.0, "gathered": 2.0} | changes)


def test_only_the_first_gather_and_the_last_reduction_are_not_hidden_by_compute():
    gather = 1.0 * 3 + 8 * 2 / 4 * 7 / 8
    assert simulate(step(), NETWORK, ranks=8) == pytest.approx(gather + 4 * 300 + gather)


def test_a_step_without_compute_takes_as_long_as_its_queues():
    gather, reduce = 3 + 8 * 2 / 4 * 7 / 8, 3 + 8 * 4 / 4 * 7 / 8
    assert simulate(step(forward=0.0, reduced=4.0), NETWORK, ranks=8) == pytest.approx(5 * gather + 4 * reduce)
    assert simulate(step(forward=0.0, reduced=0.0, gathered=0.0), FREE, ranks=8) == 0.0


def test_one_amax_all_reduce_a_step_is_added_once_and_one_a_tensor_before_every_cast():
    plain = simulate(step(linears=7), FREE, ranks=16)
    slow = Network(latency=0.0, reduce_latency=1.0, bandwidth=float("inf"))
    assert simulate(step(linears=7, amaxes="one a step"), slow, ranks=16) == pytest.approx(plain + 4)
    assert simulate(step(linears=7, amaxes="one a tensor"), slow, ranks=16) == pytest.approx(plain + 4 * 7 * 3 * 4)


def test_a_ranks_own_work_is_added_to_the_one_all_reduce():
    plain = simulate(step(linears=7), FREE, ranks=16)
    work = Work(step=3.0, scale=0.5)
    assert simulate(step(linears=7, amaxes="one a step", work=work), FREE, 16) == pytest.approx(
        plain + 3 + 4 * 7 * 3 / 2
    )
    assert simulate(step(linears=7, work=work), FREE, ranks=16) == plain


def test_stragglers_cost_more_the_more_ranks_wait_for_them():
    alone, some, many = (simulate(step(jitter=0.1), FREE, ranks) for ranks in (1, 16, 1024))
    assert 1200 < alone < some < many


def test_a_step_that_waits_for_its_gathers_gains_from_fp8_what_the_gathers_shrink():
    bound = step(forward=0.01, reduced=0.0)
    fast = Network(latency=0.0, reduce_latency=0.0, bandwidth=4.0)
    halved = TrainingStep(layers=4, forward=0.01, weights=8.0, gathered=1.0, reduced=0.0)
    assert simulate(bound, fast, 8) / simulate(halved, fast, 8) == pytest.approx(2, rel=0.02)

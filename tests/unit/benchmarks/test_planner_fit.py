"""The fit of the planner: it finds constants that made the measurements, and the package holds what it finds."""

import math
from dataclasses import replace

import pytest

from benchmarks.planner_fit import (
    PRIORS,
    ROWS,
    MemoryOutcome,
    bars,
    covered,
    fit,
    intervals_of,
    leave_families_out,
    memory_outcomes,
    outcome_of,
    read_points,
)
from octavo.planning import fitted_constants


@pytest.fixture(scope="module")
def points():
    return read_points(ROWS)[0]


def test_the_package_holds_the_constants_that_the_fit_finds(points):
    values, _ = fit(points, fitted_constants().values)
    assert set(values) == set(PRIORS)
    assert values == pytest.approx(fitted_constants().values, abs=0.02)


@pytest.mark.long
def test_the_package_holds_the_intervals_of_rows_that_were_left_out(points):
    outcomes = leave_families_out(points, fitted_constants().values)
    found = intervals_of(outcomes, memory_outcomes(read_points(ROWS)[1], points))
    assert found == pytest.approx(fitted_constants().intervals, abs=0.01)


def test_constants_that_made_the_measurements_are_found(points):
    truth = fitted_constants().values | {"gemm_bf16_hopper": 0.45, "gemm_tensor_hopper": 0.2}
    made = [
        replace(
            point,
            seconds=point.problem.seconds(truth),
            bf16_seconds=point.problem.seconds(truth, bf16=True) if point.bf16_seconds else 0.0,
        )
        for point in points
    ]
    values, deviations = fit(made, fitted_constants().values)
    for name in ("gemm_bf16_hopper", "gemm_tensor_hopper", "memory", "decode_gemm"):
        assert abs(values[name] - truth[name]) < 2 * deviations[name]
    assert max(abs(outcome_of(point, values).error) for point in made) < 0.15


def test_rows_of_a_family_are_predicted_without_it(points):
    few = [point for point in points if point.family in ("mpt-1b", "mpt-7b", "mpt-13b", "gpt-5b")]
    outcomes = leave_families_out(few, fitted_constants().values)
    assert len(outcomes) == len(few)
    without = fit([point for point in few if point.family != "gpt-5b"], fitted_constants().values)[0]
    left_out = next(each for each in outcomes if each.point.family == "gpt-5b")
    assert left_out.error == pytest.approx(outcome_of(left_out.point, without).error)
    assert left_out.metric_error == pytest.approx(math.expm1(left_out.error))  # a step's time
    assert 0 <= covered(outcomes) <= 1
    assert len(bars(outcomes, [MemoryOutcome("a", 0.02, in_sample=True)], 0)) == 7


def test_every_row_is_read_or_refused_with_a_reason():
    points, memory, refused = read_points(ROWS)
    assert len(points) + len(memory) + len(refused) == 458
    assert len(refused) <= 0.05 * 458
    assert all(len(reason) > 20 for _, reason in refused)

"""The fit of the planner: it finds constants that made the measurements, and the package holds what it finds."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

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
    widths,
)
from octavo.planning import fitted_constants
from octavo.planning.rows import Row


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
    found = bars(outcomes, [MemoryOutcome("a", 0.02, in_sample=True)], 0)
    errors = [abs(each.metric_error) for each in outcomes]
    assert f"worst {max(errors):.0%} ({len(errors)} rows)" in found[2][1]


def outcomes_with(errors) -> Any:
    """Rows of ten families, whose value and speed-up are off by ``errors``."""
    rows = [Row({"id": str(index), "kind": "train", "notes": ""}) for index in range(len(errors))]
    problem: Any = SimpleNamespace(kind="train")
    return [
        SimpleNamespace(
            point=SimpleNamespace(row=each, family=str(index % 10), problem=problem),
            error=math.log1p(error),
            metric_error=error,
            ratio_error=math.log1p(error),
        )
        for index, (each, error) in enumerate(zip(rows, errors, strict=True))
    ]


def test_bars_are_medians_and_shares_of_all_rows():
    """101 errors from 0 to 25 %: the median is 12.5 %, and 90 % lie within 22.5 %."""
    errors = [index / 400 for index in range(101)]
    found = {name: (figures, met) for name, figures, met in bars(outcomes_with(errors), [], 0)}
    speed = found["speed-up, all rows: median ≤ 7 %, 90 % within 15 %, none over 30 %"]
    assert speed == ("median 12.5%, 90 % within 22.5%, worst 25% (101 rows)", False)
    time = found["time or tokens/s: median ≤ 12 %, 90 % within 30 %"]
    assert time == ("median 12.5%, 90 % within 22.5%, worst 25% (101 rows)", False)
    few = {name: met for name, _, met in bars(outcomes_with([error / 2 for error in errors]), [], 0)}
    assert few["speed-up, all rows: median ≤ 7 %, 90 % within 15 %, none over 30 %"]
    assert few["time or tokens/s: median ≤ 12 %, 90 % within 30 %"]
    assert few["at least 95 % of rows predicted"]
    refused = {name: (figures, met) for name, figures, met in bars(outcomes_with(errors), [], 6)}
    assert refused["at least 95 % of rows predicted"] == (f"{101 / 107:.1%}", False)
    far = {name: met for name, _, met in bars(outcomes_with([*[0.01] * 100, 0.31]), [], 0)}
    assert not far["speed-up, all rows: median ≤ 7 %, 90 % within 15 %, none over 30 %"]


def test_intervals_of_other_families_hold_the_share_that_is_counted():
    """Nine families are off by at most 10 %, so that the interval is 8 % wide; the tenth is off by 20 %."""
    errors = [0.2 if index % 10 == 9 else 0.1 * (index // 10 + 1) / 100 for index in range(1000)]
    outcomes = outcomes_with(errors)
    assert covered(outcomes) == pytest.approx(0.72, abs=0.1)
    inside = [abs(each.error) <= widths(outcomes, without=each.point.family)["train"] for each in outcomes]
    assert covered(outcomes) == sum(inside) / len(inside)
    assert covered(outcomes, "train") == covered(outcomes)


def test_every_row_is_read_or_refused_with_a_reason():
    points, memory, refused = read_points(ROWS)
    assert len(points) + len(memory) + len(refused) == 458
    assert len(refused) <= 0.05 * 458
    assert all(len(reason) > 20 for _, reason in refused)

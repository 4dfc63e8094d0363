"""A loss that leaves its beginning: both sides of the threshold, and only where nothing else is found."""

import numpy as np
import pytest

from octavo.doctor import Severity, Thresholds, diagnose
from octavo.doctor.rules import divergence
from tests.unit.doctor.synthetic_series import FIRST, looks, steps

LIMITS = Thresholds()
BLOWN = [1.11] * 10 + [2.0**n for n in range(15)]


def found(losses):
    return list(divergence(looks(lines=steps(losses)), LIMITS))


@pytest.mark.parametrize(
    ("losses", "count"),
    [
        (BLOWN, 1),
        ([1.0] * 10 + [2.0] * 5, 1),
        ([1.0] * 10 + [1.99] * 5, 0),
        ([1.0] * 9 + [2.0] * 5, 0),  # 14 steps
        ([8.0] * 5 + [3.0] * 20 + [7.5] * 5, 0),
        ([1.0] * 20 + [9.0] * 2 + [1.0], 0),
        ([-1.0] * 10 + [5.0] * 10, 0),
        ([1.0] * 10 + [np.nan, np.inf] * 10, 0),
        (list(np.geomspace(8, 0.01, 40)), 0),
    ],
)
def test_a_loss_that_ends_at_twice_its_beginning(losses, count):
    assert len(found(losses)) == count


def test_its_story():
    (one,) = found(BLOWN)
    assert (one.severity, one.path, one.first_step, one.last_step) == (Severity.WARN, "", 12, 25)
    assert one.cause.startswith("the loss began at 1.11 and ends at 4.1e+03, above its beginning since step 12;")


def test_it_is_asked_where_nothing_else_is_found():
    lines = steps(BLOWN, lr=1.0)
    (one,) = diagnose(looks(lines=lines))
    assert one.code == "divergence"
    assert [remedy.changes for remedy in one.remedies] == [{"lr": 0.5}, {}]
    cause = {(FIRST, "grad_output"): {"underflow_fraction": 0.2}}
    assert [one.code for one in diagnose(looks(lines=lines, casts=cause))] == ["gradient-underflow"]

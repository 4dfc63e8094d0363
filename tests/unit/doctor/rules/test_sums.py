"""Biased sums, on both sides of the thresholds."""

import math

import pytest

from octavo.doctor import Severity, Thresholds
from octavo.doctor.rules.sums import biased_accumulation
from tests.unit.doctor.synthetic_series import SECOND, looks


@pytest.mark.parametrize(
    ("bias", "found"),
    [
        (-0.01, [Severity.WARN]),
        (0.01, [Severity.WARN]),
        (-0.0099, []),
        (-0.1, [Severity.FAIL]),
        ([-0.2, -0.2, 0, -0.2, -0.2, 0], []),
        (math.nan, []),
    ],
)
def test_biased_accumulation_needs_three_samples_of_a_hundredth(bias, found):
    series = looks(products={(SECOND, "output"): {"accumulation_bias": bias}})
    assert [one.severity for one in biased_accumulation(series, Thresholds())] == found


def test_biased_accumulation_reports_its_place_steps_and_cause():
    series = looks(products={(SECOND, "output"): {"accumulation_bias": [0, 0, -0.03, -0.07, -0.05, 0]}})
    (found,) = biased_accumulation(series, Thresholds())
    assert (found.path, found.role, found.first_step, found.last_step) == (SECOND, "output", 15, 25)
    assert found.evidence == {"accumulation_bias": -0.07}
    assert found.cause.endswith("sums of them are 7.0% too small")

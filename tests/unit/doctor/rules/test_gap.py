"""The gap to a reference, on both sides of the thresholds."""

from dataclasses import replace

import numpy as np
import pytest

from octavo.doctor import Severity, Thresholds, diagnose, series_of
from octavo.doctor.rules import loss_gap
from tests.unit.doctor.synthetic_series import healthy_sample, steps

WARMUP, LENGTH = 20, 120
REFERENCE = 3 + 2 * np.exp(-np.arange(1, LENGTH + 1) / 50)


def run(gap):
    """A run whose loss lies this share above the reference's, at each step."""
    rates = np.minimum(np.arange(1, LENGTH + 1) / WARMUP, 1.0) * 1e-3
    return series_of(steps(list(REFERENCE * (1 + np.asarray(gap))), lr=rates))


def findings(gap):
    return list(loss_gap(run(gap), run(np.zeros(LENGTH)), Thresholds()))


GROWING = np.linspace(0, 1, LENGTH)


@pytest.mark.parametrize(
    ("gap", "found"),
    [
        (GROWING * 0.0028, []),  # its last third has 0.25 % in the mean
        (GROWING * 0.0032, [Severity.WARN]),
        (GROWING * 0.020, [Severity.FAIL]),
        (GROWING[::-1] * 0.02, []),
        (np.zeros(LENGTH), []),
        (-GROWING * 0.02, []),
        (np.where(np.arange(LENGTH) < WARMUP - 1, 0.1, 0.0), []),
    ],
)
def test_a_gap_that_grows(gap, found):
    assert [one.severity for one in findings(gap)] == found


def test_loss_gap_reports_its_size_and_growth():
    (found,) = findings(GROWING * 0.01)
    assert found.path == ""
    assert found.cause.startswith("the loss is 0.8")
    assert "% above the reference's and the gap grows: it was 0." in found.cause
    assert found.evidence["nats"] == pytest.approx(found.evidence["relative_gap"] * 3.3, rel=0.1)


def test_noise_without_a_gap_is_quiet():
    noise = np.random.default_rng(0).normal(0, 0.002, LENGTH)
    assert not findings(noise)


def test_the_warm_up_is_not_compared():
    """A gap of its first steps is no early gap of the run's, beside which the later one would not have grown."""
    gap = np.where(np.arange(LENGTH) < WARMUP, 0.1, GROWING * 0.02)
    (found,) = findings(gap)
    assert found.first_step > WARMUP
    assert found.evidence["early_gap"] < 0.01


def test_too_few_common_steps_show_no_trend():
    lines = steps([3.0] * 9)
    assert not list(loss_gap(series_of(lines), series_of(steps([2.0] * 9)), Thresholds()))


def test_diagnose_compares_with_a_reference():
    series, reference = run(GROWING * 0.02), run(np.zeros(LENGTH))
    assert [one.code for one in diagnose(series, reference=reference)] == ["loss-gap"]
    assert not diagnose(series)


def mixed(losses, begins):
    """A run that casts to FP8 from step ``begins`` on, sampled every ten steps, with its line of the change."""
    sample = healthy_sample("tensorwise")
    bare = replace(sample, casts={}, products={})
    samples = [replace(sample if step >= begins else bare, step=step) for step in range(10, LENGTH + 1, 10)]
    lines = [*steps(list(losses)), {"kind": "precision", "step": begins, "recipe": "tensorwise"}]
    return series_of(lines, samples)


def test_a_gap_begins_no_earlier_than_fp8():
    """A mean over a tenth of the steps shows a gap before its first step."""
    gap = np.where(np.arange(1, LENGTH + 1) >= 63, 0.03 + 0.001 * np.arange(LENGTH), 0.0)
    (found,) = loss_gap(mixed(REFERENCE * (1 + gap), 63), run(np.zeros(LENGTH)), Thresholds())
    assert found.first_step >= 63


def test_a_gap_before_fp8_is_not_fp8s():
    gap = np.full(LENGTH, 0.02)
    (found,) = diagnose(mixed(REFERENCE * (1 + gap), 63), reference=run(np.zeros(LENGTH)))
    assert (found.code, found.severity, found.first_step, found.last_step) == ("loss-gap", Severity.WARN, 1, 62)
    assert "2.00% above the reference's before FP8 begins at step 63, so FP8 is not the cause" in found.cause
    assert all(not remedy.changes for remedy in found.remedies)

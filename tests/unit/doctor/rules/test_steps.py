"""Numbers of whole steps: both sides of every threshold."""

import math

import pytest

from octavo.doctor import Severity, Thresholds
from octavo.doctor.rules.learning_rate import learning_rate
from octavo.doctor.rules.steps import gradient_below_noise, loss_scale
from tests.unit.doctor.synthetic_series import FIRST, SECOND, looks, steps

LIMITS = Thresholds()


@pytest.mark.parametrize(
    ("ratios", "found"),
    [
        ([20, 1.7, 1.7, 1.7, 20, 20], [Severity.WARN]),
        ([20, 1.74, 1.7, 1.7, 20, 20], []),
        ([20, 1.7, 0.9, 1.7, 20, 20], [Severity.FAIL]),
        ([math.nan] * 6, []),
    ],
)
def test_gradient_noise_needs_three_samples_at_the_square_root_of_three(ratios, found):
    assert [one.severity for one in gradient_below_noise(looks(noise=ratios), LIMITS)] == found


def overflows(count, scale=65536.0):
    return [{"kind": "overflow", "step": 1 + index, "loss_scale": scale / 2**index} for index in range(count)]


@pytest.mark.parametrize(("count", "length", "found"), [(8, 800, 1), (7, 100, 0), (8, 801, 0)])
def test_overflows_again_and_again(count, length, found):
    series = looks(lines=[*overflows(count), *steps([3.0] * length, loss_scale=512.0)])
    result = list(loss_scale(series, LIMITS))
    assert [(one.severity, one.evidence["loss_scale"]) for one in result] == [(Severity.WARN, 65536.0)] * found


def test_steps_that_were_skipped_for_no_known_scale_are_no_overflows():
    lines = [{"kind": "overflow", "step": 1 + index, "loss_scale": None} for index in range(20)]
    assert not list(loss_scale(looks(lines=[*lines, *steps([3.0] * 100)]), LIMITS))


@pytest.mark.parametrize(
    ("failure", "found"),
    [
        ({"loss": 5.6, "grad_norm": None, "tensor": "gradient of the output of lm_head", "loss_scale": 2.0**24}, 1),
        ({"loss": 5.6, "grad_norm": None, "tensor": None, "loss_scale": 2.0**24}, 1),
        ({"loss": None, "grad_norm": None, "tensor": "output of mlp", "loss_scale": 2.0**24}, 0),
        ({"loss": 5.6, "grad_norm": None, "tensor": "gradient of the output of lm_head", "loss_scale": 1.0}, 0),
        ({"loss": 5.6, "grad_norm": None, "tensor": "gradient of the output of lm_head"}, 0),
    ],
)
def test_a_run_that_broke_in_its_gradients(failure, found):
    series = looks(lines=[{"kind": "failure", "step": 7, **failure}])
    result = list(loss_scale(series, LIMITS))
    assert [(one.severity, one.first_step) for one in result] == [(Severity.FAIL, 7)] * found


@pytest.mark.parametrize(
    ("rms", "zeros", "scaled", "found"),
    [(9e-7, 0.25, True, 1), (1e-6, 0.25, True, 0), (9e-7, 0.24, True, 0), (9e-7, 0.25, False, 0)],
)
def test_gradients_that_vanish_in_fp16(rms, zeros, scaled, found):
    changes = {(SECOND, "grad_output"): {"rms": rms, "zero_fraction": zeros}}
    lines = steps([3.0] * 30, **({"loss_scale": 1.0} if scaled else {}))
    result = list(loss_scale(looks(casts=changes, lines=lines), LIMITS))
    assert len(result) == found
    assert all("1 of 2 gradients, the worst at second" in one.cause for one in result)


def test_step_rules_report_nothing_for_a_healthy_sample():
    series = looks(casts={(FIRST, "grad_output"): {"zero_fraction": 0.07}}, lines=steps([3.0] * 30, lr=1e-3))
    for rule in (gradient_below_noise, loss_scale, learning_rate):
        assert not list(rule(series, LIMITS))

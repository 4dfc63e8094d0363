"""Numbers of whole steps: both sides of every threshold."""

import math
from dataclasses import replace

import numpy as np
import pytest

from octavo.doctor import Severity, Thresholds, series_of
from octavo.doctor.rules.steps import gradient_below_noise, learning_rate, loss_scale
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


def switching(*, rate=1.0, update=1.0, rise=0.0, at=20, event=True):
    """Thirty steps with a look at each; from step ``at`` on in another precision."""
    losses = [4.0 - 0.01 * step + (rise if step >= at else 0.0) for step in range(1, 31)]
    lines = steps(losses, lr=[1e-3 * (rate if step >= at else 1.0) for step in range(1, 31)])
    if event:
        lines.insert(at - 1, {"kind": "precision", "step": at, "recipe": "tensorwise"})
    updates = [1e-3 * (update if step >= at else 1.0) for step in range(1, 31)]
    return looks(count=30, interval=1, updates=updates, lines=lines)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"rate": 3.0001}, [Severity.WARN]),
        ({"rate": 2.9}, []),
        ({"update": 3.0001}, [Severity.WARN]),
        ({"update": 2.9}, []),
        ({"rate": 10, "rise": 1.0}, [Severity.FAIL]),
        ({"rise": 1.0}, []),
        ({}, []),
        ({"rate": 10, "rise": 1.0, "event": False}, [Severity.WARN]),
        ({"rate": 10, "event": False}, []),
        ({"rate": 10, "rise": 1.0, "event": False, "at": 4}, []),
    ],
)
def test_a_jump_where_the_precision_changes(changes, found):
    assert [one.severity for one in learning_rate(switching(**changes), LIMITS)] == found


def test_a_warm_up_that_goes_on_is_no_jump():
    """The rate, and the updates with it, grow fivefold within the steps after the switch."""
    rates = [1e-4 * step for step in range(1, 31)]
    lines = [*steps([4.0] * 30, lr=rates), {"kind": "precision", "step": 6, "recipe": "tensorwise"}]
    assert not list(learning_rate(looks(count=30, interval=1, updates=rates, lines=lines), LIMITS))


def test_learning_rate_jump_is_checked_at_every_switch():
    series = switching(rate=10.0, at=20)
    earlier = {"kind": "precision", "step": 10, "recipe": "bf16"}
    (found,) = learning_rate(replace(series, events=(earlier, *series.events)), LIMITS)
    assert found.first_step == 20


def test_learning_rate_jump_away_from_a_switch_is_found():
    series = switching(rate=10.0, rise=1.0, event=False)
    switch = {"kind": "precision", "step": 10, "recipe": "bf16"}
    (found,) = learning_rate(replace(series, events=(switch,)), LIMITS)
    assert (found.severity, found.first_step) == (Severity.WARN, 20)
    assert "since step 20" in found.cause


def test_a_rate_that_leaves_zero_hides_no_later_jump():
    """Nothing is a multiple of zero, even where the loss rises with it."""
    rates = [0.0] * 20 + [1e-3] * 30 + [1e-2] * 30
    losses = [2.0] * 20 + [3.0] * 30 + [5.0] * 30
    (found,) = learning_rate(series_of(steps(losses, lr=rates)), LIMITS)
    assert found.first_step == 51
    assert found.evidence["lr_ratio"] == pytest.approx(10)


@pytest.mark.parametrize(("swing", "found"), [(0.2, [Severity.FAIL]), (0.9, [Severity.WARN])])
def test_loss_rise_within_the_scatter_is_not_reported(swing, found):
    """One nat, of losses that scatter by this much."""
    series = switching(rate=10.0)
    steps, losses = series.curve("loss")
    losses = losses + np.where(steps >= 20, 1.0, 0.0) + np.where(steps % 2, swing, -swing)
    series = replace(series, curves={**series.curves, "loss": (steps, losses)})
    assert [one.severity for one in learning_rate(series, LIMITS)] == found


def test_learning_rate_jump_reports_its_steps_and_loss_rise():
    (found,) = learning_rate(switching(rate=10.0, rise=1.0), LIMITS)
    assert (found.path, found.first_step, found.last_step) == ("", 20, 30)
    assert found.cause == "the learning rate is 10x as large since the switch at step 20, and the loss rose by 0.83"


def restarting(*, periods=4, length=40, comes_back=True):
    """A cosine schedule that restarts: with each, the loss rises by 0.5 nats and is back after half of a period."""
    number = np.arange(periods * length)
    place = number % length
    rates = 1e-3 * (0.05 + 0.95 * (1 + np.cos(np.pi * place / length)) / 2)
    bump = np.where(number >= length, 0.5 * (np.clip(1 - 2 * place / length, 0, None) if comes_back else 1), 0.0)
    return series_of(steps(list(3.0 - 1e-3 * number + bump), lr=rates))


def test_a_schedule_that_restarts_is_healthy():
    assert not list(learning_rate(restarting(), LIMITS))
    assert not list(learning_rate(restarting(periods=2), LIMITS))


def test_a_restart_that_the_loss_does_not_come_back_from():
    (found,) = learning_rate(restarting(comes_back=False), LIMITS)
    assert (found.severity, found.first_step) == (Severity.WARN, 41)
    assert "x as large since step 41, and the loss rose by" in found.cause
    assert "switch" not in found.cause


def test_step_rules_report_nothing_for_a_healthy_sample():
    series = looks(casts={(FIRST, "grad_output"): {"zero_fraction": 0.07}}, lines=steps([3.0] * 30, lr=1e-3))
    for rule in (gradient_below_noise, loss_scale, learning_rate):
        assert not list(rule(series, LIMITS))

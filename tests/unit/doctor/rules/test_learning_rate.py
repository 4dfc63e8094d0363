"""A rate that is too large: both sides of every threshold, and the steps and sizes that a reader sees in the curve."""

from dataclasses import replace

import numpy as np
import pytest

from octavo.doctor import Severity, Thresholds, diagnose, series_of
from octavo.doctor.rules.learning_rate import learning_rate
from tests.unit.doctor.synthetic_series import FIRST, SECOND, looks, steps

LIMITS = Thresholds()


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
    assert (found.evidence["loss_before"], found.evidence["loss_peak"]) == pytest.approx((3.83, 4.8))
    assert found.cause == (
        "the learning rate is 10x as large since the switch at step 20, and the loss rose from 3.83 to 4.8 at step 20"
    )


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
    assert "x as large from step 41 to 72, and the loss rose from 2.96 to 3.46 at step 41" in found.cause
    assert "switch" not in found.cause


def jumping(*, factor=100.0, raised=2, peak=16.0, back=18, interval=10, casts=None, earlier=0):
    """Sixty steps; the rate is raised from step 31 on, and the loss, which began at 6.2, spikes and comes back.

    ``earlier``: number of first steps with that rate, as of a schedule that restarts.
    """
    losses = 5.4 + 0.8 * np.exp(-np.arange(60) / 8)
    losses[31 : 31 + back] += np.linspace(peak - losses[30], 0.5, back)
    rates = np.where((np.arange(60) >= 30) & (np.arange(60) < 30 + raised), factor, 1.0) * 1e-3
    rates[:earlier] *= factor
    lines = steps(list(losses), lr=rates)
    return looks("delayed", count=60 // interval, interval=interval, lines=lines, casts=casts or {})


def test_a_spike_after_a_rate_that_was_raised_for_two_steps_is_named_as_the_curve_shows_it():
    """The peak of 16 is at step 32, and half of it is gone at step 42."""
    (found,) = learning_rate(jumping(), LIMITS)
    assert (found.severity, found.first_step, found.last_step) == (Severity.WARN, 31, 40)
    assert found.evidence["loss_rise"] == pytest.approx(10.6, abs=0.05)
    assert found.cause == (
        "the learning rate is 100x as large from step 31 to 32, and the loss rose from 5.43 to 16 at step 32"
    )


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({"peak": 6.2, "earlier": 6}, 0),  # a restart, below the loss at the beginning
        ({"peak": 6.2}, 1),
        ({"peak": 7.0, "earlier": 6}, 1),
        ({"back": 1}, 0),  # a single step, as of a bad batch
        ({"factor": 2.9}, 0),
        ({"factor": 3.1}, 1),
    ],
)
def test_a_spike_needs_a_jump_and_two_steps_above_the_beginning(changes, count):
    assert len(list(learning_rate(jumping(**changes), LIMITS))) == count


@pytest.mark.parametrize("since", [3, 4])
def test_a_jump_under_which_the_loss_spikes_explains_what_follows(since):
    """Samples are at 10, 20, …, 60: what is first seen at step 40 follows, what is there at step 30 does not."""
    casts = {
        (FIRST, "grad_output"): {"underflow_fraction": [0.0] * (since - 1) + [0.9] * (7 - since)},
        (SECOND, "grad_output"): {
            "stale_ratio": [1.0] * (since - 1) + [1 / 64] * (7 - since),
            "underflow_fraction": [0.0] * (since - 1) + [0.9] * (7 - since),
        },
    }
    codes = [one.code for one in diagnose(jumping(casts=casts))]
    if since == 4:
        assert codes == ["learning-rate"]
    else:
        assert set(codes) == {"learning-rate", "stale-scale"}


VANISHING = {
    (SECOND, "grad_output"): {
        "stale_ratio": [1.0, 1.0, 1 / 64, 1 / 64, 1 / 64, 1 / 64],
        "underflow_fraction": [0.0, 0.0, 0.8, 0.8, 0.8, 0.8],
    }
}


@pytest.mark.parametrize(
    ("first", "casts", "codes"),
    [
        (0.099, VANISHING, ["stale-scale"]),
        (0.101, VANISHING, ["learning-rate", "stale-scale"]),
        (0.99, {}, []),
        (1.01, {}, ["learning-rate"]),
        (1.01, VANISHING, ["learning-rate"]),
        (0.5, {(SECOND, "grad_output"): {"underflow_fraction": 0.8}}, ["gradient-underflow"]),  # before the update too
        (0.5, {(SECOND, "input"): {"underflow_fraction": [0.0, 0.0, 0.8, 0.8, 0.8, 0.8]}}, ["bulk-underflow"]),
    ],
)
def test_a_large_update_comes_before_gradients_that_vanish_after_it(first, casts, codes):
    updates = [first, 0.02, 0.01, 0.01, 0.01, 0.01]
    lines = steps(list(np.linspace(6.0, 4.0, 60)), lr=3e-3)
    findings = diagnose(looks("delayed", count=6, interval=10, updates=updates, casts=casts, lines=lines))
    assert [one.code for one in findings if one.code != "outlier-growth"] == codes
    if codes[:1] == ["learning-rate"]:
        assert findings[0].remedies[0].changes == {"lr": 1.5e-3}


def test_updates_of_weights_that_begin_at_zero_are_no_large_ones():
    """An adapter's second matrix is zero at first: its update is infinitely large, and then as large as it."""
    series = looks(casts=VANISHING, lines=steps([6.0] * 30, lr=1e-3))
    first, second = np.full(6, 0.02), np.array([np.inf, 1.0, 0.5, 0.3, 0.25, 0.2])

    def count(*updates):
        table = series.parameters
        values = table.values[:, :2].copy()
        values[:, :, 2] = np.stack(updates, axis=1)
        parameters = replace(table, keys=table.keys[:2], values=values)
        return len(list(learning_rate(replace(series, parameters=parameters), LIMITS)))

    assert count(first, second) == 0
    assert count(second, second) == 1


STUCK = [7.6, 6.8, *[6.4] * 58]


@pytest.mark.parametrize(
    ("growth", "losses", "codes"),
    [
        (3.01, STUCK, ["learning-rate"]),
        (2.99, STUCK, ["stale-scale"]),
        (9.0, list(np.linspace(7.6, 6.4, 60)), ["stale-scale"]),
        (9.0, [7.6, 6.8, *[3.7] * 58], ["stale-scale"]),  # less than half of the first
        (9.0, [7.6, *[6.4] * 38], ["stale-scale"]),  # too few to tell
        (9.0, [7.6, *np.linspace(5.0, 3.9, 20), *[6.4] * 39], ["stale-scale"]),  # it had fallen
    ],
)
def test_weights_that_grow_under_a_loss_that_does_not_fall_explain_what_follows(growth, losses, codes):
    """The first layer's weight grows a little less, the second's a little more: the median counts."""
    ramp = np.linspace(0, 1, 6)
    casts = {
        (FIRST, "weight"): {"rms": 0.1 * (0.99 * growth) ** ramp},
        (SECOND, "weight"): {"rms": 0.1 * (1.01 * growth) ** ramp},
    }
    findings = diagnose(looks("delayed", count=6, interval=10, casts=VANISHING | casts, lines=steps(losses, lr=0.1)))
    assert [one.code for one in findings if one.code != "divergence"] == codes
    if codes == ["learning-rate"]:
        (found,) = findings
        assert found.consequences == {"stale-scale": 1, "gradient-underflow": 1}
        assert found.cause == (
            "the learning rate of up to 0.1 is too large: updates made the weights 3x as large (the median of all), "
            "and the loss has not fallen since step 3 and stays at 6.4"
        )
        assert found.remedies[0].changes == {"lr": 0.05}


FALLING = [7.6, *np.linspace(6.8, 5.8, 59)]


@pytest.mark.parametrize(
    ("growth", "unigram", "losses", "codes"),
    [
        (2.51, 6.3, FALLING, ["learning-rate"]),
        (2.49, 6.3, FALLING, ["stale-scale"]),
        (2.51, 6.7, FALLING, ["stale-scale"]),  # well below the unigram entropy
        (2.51, None, FALLING, ["stale-scale"]),
        (2.51, 6.3, FALLING[:59], ["stale-scale"]),  # too few to tell
        (2.51, 6.3, STUCK, ["learning-rate"]),
    ],
)
def test_weights_that_grow_under_a_loss_near_the_unigram_entropy_explain_what_follows(growth, unigram, losses, codes):
    """It may still fall a little, as the rate does."""
    casts = {(path, "weight"): {"rms": 0.1 * growth ** np.linspace(0, 1, 6)} for path in (FIRST, SECOND)}
    series = looks("delayed", count=6, interval=10, casts=VANISHING | casts, lines=steps(losses, lr=0.01))
    findings = diagnose(replace(series, unigram_nats=unigram))
    assert [one.code for one in findings] == codes
    if losses is FALLING and codes == ["learning-rate"]:
        (found,) = findings
        assert found.evidence["unigram_nats"] == unigram
        assert found.cause == (
            "the learning rate of up to 0.01 is too large: updates made the weights 2.5x as large (the median of all), "
            "and the loss ends at 5.92, near the unigram entropy of 6.3"
        )
        assert found.remedies[0].changes == {"lr": 0.005}


def test_a_rate_is_as_severe_as_what_follows_from_it():
    casts = {
        (SECOND, "grad_output"): {"stale_ratio": [1.0] * 3 + [1e-6] * 3, "underflow_fraction": [0.0] * 3 + [0.9] * 3}
    }
    (found,) = diagnose(jumping(casts=casts))
    assert (found.code, found.severity) == ("learning-rate", Severity.FAIL)

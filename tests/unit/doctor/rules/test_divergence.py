"""A loss that leaves its beginning or loses its gain: both sides of each threshold, and what it explains."""

import dataclasses

import numpy as np
import pytest

from octavo.doctor import Severity, Thresholds, diagnose
from octavo.doctor.rules.divergence import divergence, loss_spike
from tests.unit.doctor.synthetic_series import FIRST, SECOND, looks, steps

LIMITS = Thresholds()
BLOWN = [1.11] * 10 + [2.0**n for n in range(15)]


def found(losses, **numbers):
    return list(divergence(looks(lines=steps(losses, **numbers)), LIMITS))


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
        ([1.0, *np.geomspace(30, 10, 29)], 1),  # of which only the first loss is older than the damage
        ([1.0] * 9 + [0.5, 1.5] * 10 + [2.0, 3.0] * 3, 0),  # 2.5 in the mean, of a scatter of 0.5
        ([7.0] * 50 + [30.0] * 49 + [6.9], 0),  # the newest step came back
    ],
)
def test_a_loss_that_ends_at_twice_its_beginning(losses, count):
    assert len(found(losses)) == count


def falling(*, least=3.0, length=60):
    return list(least + (7.6 - least) * np.exp(-np.arange(length) / 6))


@pytest.mark.parametrize(
    ("losses", "count"),
    [
        (falling() + [8.0] * 24, 1),
        (falling() + [8.0] * 17, 0),  # not for long
        (falling(least=2.0) + [8.0] * 24, 1),
        (falling(least=6.12) + [7.65] * 24, 1),
        (falling() + [4.75] * 24, 1),  # 53 % of the gain
        (falling() + [4.55] * 24, 0),
        (falling() + [8.0] * 30 + [3.0] * 10, 0),  # it comes back
        (falling(length=400) + [8.0] * 30, 0),  # less than a tenth of the run
        (falling(length=400) + [8.0] * 60, 1),
        (falling(least=6.7) + [7.65] * 24, 0),  # a gain of 9 %
        (falling(least=6.5) + [7.65] * 24, 1),
        ([3.0] * 60, 0),
        (falling(length=200), 0),
        (falling() + [20.0] * 3 + [3.1], 0),
        ([0.0] * 40, 0),
        ([-1.0] * 40, 0),
        ([0.0] * 6 + list(np.linspace(0, -5, 40)) + [-1.0] * 40, 0),  # a beginning without a scale
    ],
)
def test_a_loss_that_loses_what_it_had_gained(losses, count):
    assert len(found(losses)) == count


def test_loss_rise_after_warmup_is_a_divergence_only_if_it_persists():
    """The rate rises for 40 steps; a rise of 30 steps after it is none yet, one of 60 is."""
    losses = falling(length=50) + [7.6] * 60
    rates = np.minimum(np.arange(1, 111) / 40, 1.0)
    assert not found(losses[:80], lr=rates)
    assert found(losses, lr=rates)
    assert not found(falling(length=30) + [7.6] * 40, lr=rates[:70]), "it began within the warm-up"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("length", [15, 40, 200])
def test_noise_is_quiet(seed, length):
    """Scatter without a trend, each loss alone or with its neighbours; and a rate that restarts and comes back."""
    rng = np.random.default_rng(seed)
    alone = rng.normal(size=length)
    together = np.convolve(rng.normal(size=length + 4), np.ones(5) / 5**0.5, mode="valid")
    step = np.arange(length)
    cycle = length // 3
    restarted = 2 + 5 * np.exp(-5 * step / length) + np.where(step >= cycle, 2 * (1 - step % cycle / cycle), 0)
    for losses in (np.exp(0.5 * alone), np.abs(2 + 0.4 * together), restarted + 0.1 * alone):
        assert not found(list(losses))


def test_divergence_reports_severity_steps_and_cause():
    (one,) = found(BLOWN)
    assert (one.severity, one.path, one.first_step, one.last_step) == (Severity.WARN, "", 12, 25)
    assert one.evidence["seen_at"] == 15
    assert one.cause.startswith("the loss began at 1.11 and ends at 4.1e+03, above its beginning since step 12;")
    (one,) = found(falling() + [8.0] * 24)
    assert (one.first_step, one.last_step) == (61, 84)  # no look is later
    assert one.cause.startswith(
        "the loss fell from 6.3 to 3 and ends at 8, having lost what it had gained since step 61, and stays at 8;"
    )


def test_divergence_is_reported_beside_its_earlier_cause():
    lines = steps(BLOWN, lr=1.0)
    (one,) = diagnose(looks(lines=lines))
    assert one.code == "divergence"
    assert [remedy.changes for remedy in one.remedies] == [{"lr": 0.5}, {}]
    cause = {(FIRST, "grad_output"): {"underflow_fraction": 0.2}}
    assert {one.code for one in diagnose(looks(lines=lines, casts=cause))} == {"divergence", "gradient-underflow"}


@pytest.mark.parametrize(
    ("since", "codes"), [(3, {"divergence"}), (2, {"divergence", "gradient-underflow", "stale-scale"})]
)
def test_symptoms_first_sampled_after_the_divergence_are_consequences(since, codes):
    """The loss leaves at step 12; looks are at 5, 10, 15 and 20. Nobody can tell what the one at 15 is the first of."""

    def late(usual, then):
        return [usual] * since + [then] * (6 - since)

    casts = {
        (FIRST, "grad_output"): {"underflow_fraction": late(0, 0.6)},
        (SECOND, "weight"): {"stale_ratio": late(1, 1 / 20), "underflow_fraction": late(0, 0.2)},
    }
    assert {one.code for one in diagnose(looks("delayed", lines=steps(BLOWN), casts=casts))} == codes


@pytest.mark.parametrize(
    ("since", "codes"), [(1, {"stale-scale"}), (2, {"stale-scale", "divergence"}), (3, {"divergence"})]
)
def test_symptom_before_the_divergence_is_its_cause_and_one_sampled_next_is_reported_beside_it(since, codes):
    """The loss leaves at step 12; looks are at 10, 15 and 20."""
    casts = {(FIRST, "input"): {"stale_ratio": [1.0] * since + [16.0] * (6 - since)}}
    assert {one.code for one in diagnose(looks("delayed", lines=steps(BLOWN), casts=casts))} == codes


@pytest.mark.parametrize(("since", "codes"), [(11, {"stale-scale"}), (12, {"stale-scale", "divergence"})])
def test_symptom_in_the_step_of_the_divergence_is_reported_beside_it(since, codes):
    casts = {(FIRST, "input"): {"stale_ratio": [1.0] * (since - 1) + [16.0] * (26 - since)}}
    series = looks("delayed", count=25, interval=1, lines=steps(BLOWN), casts=casts)
    assert {one.code for one in diagnose(series)} == codes


def collapsing(level, *, of=84, at=60, seed=0):
    """A loss that falls to 3, jumps at a step and stays at a level."""
    losses = np.array(falling(length=at) + [level] * (of - at))
    return list(losses + 0.02 * np.random.default_rng(seed).normal(size=of))


def with_unigram(series, nats):
    return dataclasses.replace(series, unigram_nats=nats)


FOLLOWING = {
    (FIRST, "input"): {"stale_ratio": [1.0] * 12 + [16.0] * 5},
    (SECOND, "grad_output"): {"underflow_fraction": [0.0] * 12 + [0.9] * 5},
}


@pytest.mark.parametrize("unigram", [None, 6.3])
def test_a_loss_that_jumps_to_the_unigram_entropy_and_stays_comes_first(unigram):
    """Looks are at 5, 10, …, 85; the loss jumps at step 61; scales are stale and gradients vanish from 65 on."""
    lines = steps(collapsing(6.25), lr=4e-3)
    series = with_unigram(looks("delayed", count=17, lines=lines, casts=FOLLOWING), unigram)
    first, *others = diagnose(series)
    assert (first.code, first.severity, first.first_step) == ("divergence", Severity.FAIL, 61)
    assert first.remedies[0].text == "Lower the learning rate: peak at 0.002, and compare with a run in BF16."
    assert first.remedies[0].changes == {"lr": 2e-3}
    assert [one.code for one in others] == ["stale-scale"], "at the look that shows the jump; it explains the rest"
    where = "stays at 6.2" if unigram is None else "stays at the unigram entropy of 6.3"
    assert where in first.cause


@pytest.mark.parametrize(
    ("losses", "count"),
    [
        (collapsing(6.25, at=9100, of=10_000), 1),
        (collapsing(6.25, at=99_900, of=100_000), 1),
        (collapsing(6.25, at=60, of=2000), 1),  # the best was held for less than a tenth of the run
        (collapsing(6.25, at=400, of=424), 1),
        (collapsing(6.25, at=400, of=417), 0),  # not for long
        (collapsing(8.0, at=400, of=430), 0),  # a transient: it lies where no model stays
        (collapsing(3.0, at=400, of=430), 0),
        (collapsing(6.25, at=400, of=430) + [3.0] * 10, 0),  # it comes back
        (falling(length=400) + list(np.linspace(5.6, 7.0, 30)), 0),  # and this passes by
        (list(6.3 + 1.1 * np.exp(-np.arange(2000) / 20)), 0),  # nothing was gained
    ],
    ids=lambda value: f"{len(value)} losses" if isinstance(value, list) else str(value),
)
def test_a_loss_at_the_unigram_entropy_is_believed_soon_however_long_the_run(losses, count):
    series = with_unigram(looks(lines=steps(losses)), 6.3)
    collapses = list(divergence(series, LIMITS))
    assert [one.severity for one in collapses] == [Severity.FAIL] * count
    assert all("stays at the unigram entropy of 6.3" in one.cause for one in collapses)


def test_the_unigram_entropy_bounds_what_there_was_to_lose():
    """From 6.9 to 5.2 and back to 6.0: 46 % of the fall, and 72 % of what was learned beyond frequencies."""
    losses = falling(least=5.2) + [6.0] * 24
    series = looks(lines=steps(losses))
    assert not list(divergence(series, LIMITS))
    (one,) = divergence(with_unigram(series, 6.3), LIMITS)
    assert one.severity is Severity.FAIL


@pytest.mark.parametrize(
    "losses", [falling() + list(np.linspace(5.6, 8.0, 24)), collapsing(9.0), falling(length=200)], ids=str
)
def test_loss_that_moves_or_is_away_from_the_unigram_entropy_is_no_collapse(losses):
    series = with_unigram(looks(lines=steps(losses)), 6.3)
    assert all(one.severity is Severity.WARN for one in divergence(series, LIMITS))


@pytest.mark.parametrize(
    ("losses", "count"),
    [
        ([6.2, 6.0, 5.8, 7.6, 9.2, 7.9, 6.8, *falling()], 1),
        ([6.2, 6.0, 5.8, 7.3, 7.4, 7.3, 6.8, *falling()], 0),  # 1.19 times the beginning
        ([6.2, 6.0, 5.8, 5.7, 9.2, 5.6, 5.5, *falling(least=3.0)], 0),  # a single batch
        (falling() + [20.0] * 3 + [3.1], 1),
        (falling(), 0),
        ([3.0] * 60, 0),
        ([6.2, 7.9, 9.2, 8.0], 0),  # too few
        ([-1.0] * 10 + [5.0] * 3 + [-1.0] * 10, 0),
        ([3.0 + (-1) ** n for n in range(30)] + [4.9, 4.9, 4.9], 0),  # within five standard deviations
    ],
)
def test_a_loss_that_spikes_above_its_beginning(losses, count):
    series = looks(lines=steps(losses, lr=3e-3))
    assert len(list(loss_spike(series, LIMITS))) == count


def test_spike_reports_its_steps_its_size_and_the_rate():
    """It is at 7.5 or more in steps 4 to 6, and half of the rise from 6 to 9.2 is gone at step 7."""
    losses = [6.2, 6.0, 5.8, 7.6, 9.2, 7.9, 6.8, *falling()]
    casts = {(SECOND, "grad_output"): {"underflow_fraction": [0.0] + [0.9] * 5}}
    spike, *others = diagnose(looks(count=6, interval=5, lines=steps(losses, lr=3e-3), casts=casts))
    assert (spike.code, spike.severity, spike.first_step, spike.last_step) == ("loss-spike", Severity.WARN, 4, 6)
    assert spike.cause == (
        "the loss rose from 6 to 9.2 at step 5, above its beginning of 6.2: check the learning rate, which was 0.003, "
        "and the batches before"
    )
    assert spike.remedies[0].changes == {"lr": 1.5e-3}
    assert not others, "it explains what is first seen after the next sample"


def test_spike_comes_before_what_is_first_seen_in_the_same_sample_and_after_what_was_seen_before():
    losses = [6.2, 6.0, 5.8, 7.6, 9.2, 7.9, 6.8, *falling()]

    def codes(casts):
        return [one.code for one in diagnose(looks("delayed", count=30, interval=2, lines=steps(losses), casts=casts))]

    vanishing = {(SECOND, "grad_output"): {"underflow_fraction": [0.0] + [0.9] * 29}}
    assert codes(vanishing) == ["loss-spike", "gradient-underflow"]
    assert codes({(SECOND, "input"): {"stale_ratio": 16.0}}) == ["stale-scale"]

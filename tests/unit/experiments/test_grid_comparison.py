"""Comparison of synthetic grids whose gaps, spikes and failures are known."""

import math
from dataclasses import replace

import numpy as np
import pytest

from octavo.experiments.bars import Bars
from octavo.experiments.cells import Cell, CellResult, Variant
from octavo.experiments.grid_comparison import GridComparison, spikes
from octavo.experiments.presets import Claim, outcome
from octavo.training.comparison import RunMeasures

STEPS = 100


def result(name, seed, nats, *, windows=64, slope=0.0, failed_at=None, lr=1.0, tokens_per_second=1000.0, faster=1.0):
    """A run whose validation loss falls as exp(−step · faster / 40) to ``nats``, plus a slope."""
    text = np.random.default_rng(99).standard_normal(windows)  # the same windows for all runs
    own = np.random.default_rng([seed, len(name)]).standard_normal(windows)
    curve = tuple(
        (step, nats + 3 * math.exp(-step * faster / 40) + slope * step / 1000) for step in range(0, STEPS + 1, 10)
    )
    run = RunMeasures(
        recipe=name,
        steps=STEPS,
        train_curve=tuple((step, 4.0) for step in range(1, STEPS + 1)),
        validation_curve=curve,
        window_nats=() if failed_at else tuple(nats + 0.5 * text + 1e-4 * own),
        tokens_per_second=tokens_per_second,
        peak_memory_bytes=1 << 20,
    )
    cell = Cell(variant=Variant(name=name, recipe=name), seed=seed, lr=lr)
    return CellResult(cell=cell, run=run, failed_at=failed_at)


def compared(results, **bars):
    return GridComparison(results, baseline="bf16", bars=Bars(**bars), unigram_nats=6.0)


BASE = [result("bf16", seed, 4.0 + 0.01 * seed) for seed in range(5)]


def test_a_gap_is_paired_over_seeds():
    """Seeds differ by 0.01 nats each, runs of one seed by 0.002: unpaired, nothing would be seen."""
    others = [result("rowwise", seed, 4.002 + 0.01 * seed) for seed in range(5)]
    comparison = compared(BASE + others)
    measures = comparison.measures(("rowwise", 1.0, 1.0))
    assert measures.gap.estimate == pytest.approx(0.002, abs=2e-4)
    assert 0 < measures.gap.low < 0.002 < measures.gap.high < 0.003
    assert measures.spread == pytest.approx(np.std([4.0, 4.01, 4.02, 4.03, 4.04], ddof=1), abs=1e-4)
    assert comparison.verdict(measures) == "within 0.005 nats, inside the baseline's spread"


def test_a_gap_beyond_the_bar_is_above_it():
    others = [result("rowwise", seed, 4.03 + 0.01 * seed) for seed in range(5)]
    comparison = compared(BASE + others)
    verdict = comparison.verdict(comparison.measures(("rowwise", 1.0, 1.0)))
    assert verdict == "above 0.005 nats, outside the baseline's spread"


def test_diverged_runs_are_counted_and_leave_the_gap():
    others = [result("rowwise", seed, 4.001 + 0.01 * seed) for seed in range(3)]
    others += [result("rowwise", 3, 7.0), result("rowwise", 4, 4.0, failed_at=17)]
    measures = compared(BASE + others).measures(("rowwise", 1.0, 1.0))
    assert (measures.seeds, measures.diverged) == (5, 2)
    assert measures.gap.estimate == pytest.approx(0.001, abs=2e-4)


def test_the_tail_slope_is_that_of_the_gap():
    others = [result("rowwise", seed, 4.0 + 0.01 * seed, slope=0.5 + 0.01 * seed) for seed in range(5)]
    measures = compared(BASE + others).measures(("rowwise", 1.0, 1.0))
    assert measures.tail_slope.estimate == pytest.approx(0.52)
    assert measures.tail_slope.p_above_zero < 1e-4


def test_steps_and_seconds_to_targets_are_relative():
    """A run that falls 1.25 times as fast reaches each loss in 0.8 of the steps; half its speed doubles the time."""
    others = [result("rowwise", seed, 4.0 + 0.01 * seed, faster=1.25, tokens_per_second=500.0) for seed in range(5)]
    measures = compared(BASE + others, targets=(0.5,)).measures(("rowwise", 1.0, 1.0))
    assert measures.steps_to_targets[0] == pytest.approx(0.8, abs=0.01)
    assert measures.seconds_to_targets[0] == pytest.approx(2 * measures.steps_to_targets[0])


def test_a_target_that_a_seed_misses_has_no_ratio():
    others = [result("rowwise", seed, 5.9) for seed in range(5)]
    assert compared(BASE + others).measures(("rowwise", 1.0, 1.0)).steps_to_targets == (None, None, None)


def test_pairs_are_ranked_by_corrected_p_values():
    results = BASE + [
        result(name, seed, 4.0 + gap + 0.01 * seed)
        for name, gap in (("rowwise", 0.01), ("mxfp8", 0.02))
        for seed in range(5)
    ]
    ranking = compared(results).ranking(1.0, 1.0)
    assert {(pair.better, pair.worse) for pair in ranking} == {
        ("bf16", "rowwise"), ("bf16", "mxfp8"), ("rowwise", "mxfp8")
    }  # fmt: skip
    assert all(pair.p_value < 0.05 for pair in ranking)


@pytest.mark.parametrize(("gap", "verdict"), [(0.01, "confirmed"), (-0.01, "contradicted"), (0.0, "open")])
def test_a_claim_is_decided_by_its_interval(gap, verdict):
    results = BASE + [result("rowwise", seed, 4.0 + gap + 0.01 * seed) for seed in range(5)]
    claim = Claim(text="", source="", better=("bf16", 1.0, 1.0), worse=("rowwise", 1.0, 1.0))
    found = outcome(claim, compared(results))
    assert found.verdict == verdict


@pytest.mark.parametrize(("cost", "verdict"), [(0.02, "confirmed"), (0.0, "contradicted"), (0.01, "open")])
def test_a_claim_can_compare_what_two_changes_cost(cost, verdict):
    """The better one lies 0.01 above a baseline that is 0.5 higher than the other's."""
    losses = {"rowwise": 4.0 + cost, "bf16-other": 4.5, "rowwise-other": 4.51}
    results = BASE + [result(name, seed, nats + 0.01 * seed) for name, nats in losses.items() for seed in range(5)]
    better, worse = ("rowwise-other", 1.0, 1.0), ("rowwise", 1.0, 1.0)
    baselines = (("bf16-other", 1.0, 1.0), ("bf16", 1.0, 1.0))
    found = outcome(Claim(text="", source="", better=better, worse=worse, baselines=baselines), compared(results))
    assert found.verdict == verdict
    assert found.difference is not None
    assert found.difference.estimate == pytest.approx(cost - 0.01, abs=2e-4)


@pytest.mark.parametrize(
    ("gap", "bar", "verdict"),
    [(0.002, 0.005, "confirmed"), (-0.02, 0.005, "confirmed"), (0.03, 0.005, "contradicted"), (0.03, 0.03, "open")],
)
def test_a_claim_of_no_loss_is_decided_by_the_bar(gap, bar, verdict):
    results = BASE + [result("rowwise", seed, 4.0 + gap + 0.01 * seed) for seed in range(5)]
    claim = Claim(text="", source="", better=("bf16", 1.0, 1.0), worse=("rowwise", 1.0, 1.0), loses_nothing=True)
    assert outcome(claim, compared(results, gap_nats=bar)).verdict == verdict


def test_a_claim_about_runs_that_all_broke_is_open():
    results = BASE + [result("rowwise", seed, 4.0, failed_at=3) for seed in range(5)]
    claim = Claim(text="", source="", better=("bf16", 1.0, 1.0), worse=("rowwise", 1.0, 1.0))
    assert outcome(claim, compared(results)).verdict == "open"


def test_spikes_are_single_losses_far_above_the_ones_before():
    losses = [4.0 - 0.01 * step + 0.02 * (step % 3) for step in range(200)]
    assert spikes(losses, height=6.0) == 0
    losses[70], losses[150] = 6.0, 9.0
    assert spikes(losses, height=6.0) == 2


def test_a_claim_tells_what_its_casts_cost_a_gradient():
    """Medians over the seeds that did not diverge, the better group's first."""
    results = []
    for name, errors in (("bf16", (0.01, 0.02, 0.06)), ("rowwise", (0.05, 0.07, None, 0.9))):
        for seed, error in enumerate(errors):
            one = result(name, seed, 9.0 if seed == 3 else 4.0)
            results.append(replace(one, run=replace(one.run, gradient_error=error)))
    claim = Claim(text="", source="", better=("bf16", 1.0, 1.0), worse=("rowwise", 1.0, 1.0))
    assert outcome(claim, compared(results)).gradient_errors == pytest.approx((0.02, 0.06))
    claim = replace(claim, better=("mxfp8", 1.0, 1.0))
    assert outcome(claim, compared(results)).gradient_errors[0] is None

"""Comparison of synthetic grids whose gaps, spikes and failures are known."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from octavo.experiments import grid_tables
from octavo.experiments.bars import Bars
from octavo.experiments.cells import Cell, CellResult, Variant
from octavo.experiments.claims import Claim, outcomes
from octavo.experiments.grid_comparison import GridComparison, spikes
from octavo.experiments.intervals import facts_with_ends, holm
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


def outcome(claim, comparison):
    (found,) = outcomes([(claim, comparison)])
    return found


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
    facts, (pair,) = facts_with_ends(measures), comparison.ranking(1.0, 1.0)
    assert (facts["gap"]["low"], facts["gap"]["high"]) == (measures.gap.low, measures.gap.high)
    assert facts_with_ends(pair)["difference"]["high"] == pair.difference.high


def test_a_gap_beyond_the_bar_is_above_it():
    others = [result("rowwise", seed, 4.03 + 0.01 * seed) for seed in range(5)]
    comparison = compared(BASE + others)
    verdict = comparison.verdict(comparison.measures(("rowwise", 1.0, 1.0)))
    assert verdict == "above 0.005 nats, outside the baseline's spread"


def test_diverged_runs_are_counted_and_leave_the_gap():
    others = [result("rowwise", seed, 4.001 + 0.01 * seed) for seed in range(3)]
    others += [result("rowwise", 3, 7.0), result("rowwise", 4, 4.0, failed_at=17)]
    comparison = compared(BASE + others)
    measures = comparison.measures(("rowwise", 1.0, 1.0))
    assert (measures.seeds, measures.diverged, measures.lost) == (5, 2, 2)
    assert measures.gap.estimate == pytest.approx(0.001, abs=2e-4)
    assert comparison.verdict(measures) == "2 of 5 runs diverged, 2 more than the baseline's"
    assert comparison.ranking(1.0, 1.0) == []
    assert measures.seeds_needed is None
    assert not comparison.is_within(measures)


def test_seeds_that_the_baseline_lost_too_are_nobodys_loss():
    runs = [
        result(name, seed, 7.0 if seed == 4 else 4.0 + 0.01 * seed) for name in ("bf16", "rowwise") for seed in range(5)
    ]
    comparison = compared(runs)
    measures = comparison.measures(("rowwise", 1.0, 1.0))
    assert (measures.diverged, measures.lost) == (1, 0)
    assert comparison.is_within(measures)


def test_one_run_lost_on_each_side_is_nobodys_loss_and_no_order():
    losses = {"bf16": (7.0, 4.01, 4.02, 4.03), "rowwise": (4.0, 4.01, 4.02, 7.0)}
    comparison = compared([result(name, *pair) for name, each in losses.items() for pair in enumerate(each)])
    assert comparison.measures(("rowwise", 1.0, 1.0)).lost == 0
    assert comparison.ranking(1.0, 1.0) == []


def test_the_spread_bounds_the_upper_end_of_the_gap():
    """The estimate alone lies inside of BF16's spread of 0.0158."""
    comparison = compared(BASE + noisy("rowwise", 0.01, 0.006), gap_nats=0.001)
    measures = comparison.measures(("rowwise", 1.0, 1.0))
    assert measures.gap.estimate < measures.spread < measures.gap.high
    assert comparison.verdict(measures) == "undecided at 0.001 nats, outside the baseline's spread"


def test_a_slope_is_judged_among_all_variants():
    def sloping(name, values):
        return [result(name, seed, 4.0 + 0.01 * seed, slope=value) for seed, value in enumerate(values)]

    steep, flat = sloping("rowwise", (0.1, 0.5, 0.2, 0.4, -0.02)), (0.1, -0.1, 0.05, -0.05, 0.0)
    others = [each for name in ("mxfp8", "delayed", "blockwise") for each in sloping(name, flat)]
    alone, among = compared(BASE + steep), compared(BASE + steep + others)
    group = ("rowwise", 1.0, 1.0)
    assert 0.0125 < alone.measures(group).tail_slope.p_above_zero < 0.05
    assert "grows" in alone.verdict(alone.measures(group))
    assert "grows" not in among.verdict(among.measures(group))


def test_one_seed_gives_no_interval_no_order_and_no_verdict():
    """However many windows: the next seed may end elsewhere."""
    comparison = compared([result("bf16", 0, 4.0), result("rowwise", 0, 4.05)])
    measures = comparison.measures(("rowwise", 1.0, 1.0))
    assert measures.gap.estimate == pytest.approx(0.05, abs=2e-4)
    assert math.isnan(measures.gap.error)
    assert comparison.verdict(measures) == "one seed: no interval"
    assert not comparison.is_within(measures)
    assert comparison.ranking(1.0, 1.0) == []
    claim = Claim(text="", source="", better=("bf16", 1.0, 1.0), worse=("rowwise", 1.0, 1.0))
    found = outcome(claim, comparison)
    assert (found.verdict, found.p_value, found.seeds_needed) == ("open", None, None)


def test_the_tail_slope_is_that_of_the_gap():
    others = [result("rowwise", seed, 4.0 + 0.01 * seed, slope=0.5 + 0.01 * seed) for seed in range(5)]
    measures = compared(BASE + others).measures(("rowwise", 1.0, 1.0))
    assert measures.tail_slope.estimate == pytest.approx(0.52)
    assert measures.tail_slope.p_above_zero < 1e-4


def test_a_gap_that_grows_early_alone_does_not_grow_at_the_end():
    """Over the last third of the steps, not over the run: the first fall is steep."""
    others = []
    for seed in range(5):
        one = result("rowwise", seed, 4.0 + 0.01 * seed)
        curve = tuple((step, nats - 0.5 * (step < 60)) for step, nats in one.run.validation_curve)
        others.append(replace(one, run=replace(one.run, validation_curve=curve)))
    comparison = compared(BASE + others)
    measures = comparison.measures(("rowwise", 1.0, 1.0))
    assert measures.tail_slope.estimate == pytest.approx(0.0, abs=1e-9)
    assert "grows" not in comparison.verdict(measures)


def test_a_gap_that_grows_is_said_to():
    others = [result("rowwise", seed, 4.0 + 0.01 * seed, slope=0.5 + 0.01 * seed) for seed in range(5)]
    comparison = compared(BASE + others)
    assert comparison.verdict(comparison.measures(("rowwise", 1.0, 1.0))).endswith("; the gap grows at the end")


def test_steps_and_seconds_to_targets_are_relative():
    """A run that falls 1.25 times as fast reaches each loss in 0.8 of the steps; half its speed doubles the time."""
    others = [result("rowwise", seed, 4.0 + 0.01 * seed, faster=1.25, tokens_per_second=500.0) for seed in range(5)]
    measures = compared(BASE + others, targets=(0.5,)).measures(("rowwise", 1.0, 1.0))
    steps, seconds = measures.steps_to_targets[0], measures.seconds_to_targets[0]
    assert steps.estimate == pytest.approx(0.8, abs=0.01)
    assert seconds.estimate == pytest.approx(2 * steps.estimate)


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


def noisy(name, gap, seed_effect):
    return [result(name, seed, 4.0 + gap + 0.01 * seed + seed_effect * (seed - 2)) for seed in range(5)]


def test_a_pair_that_is_unlikely_alone_is_not_among_many():
    """p = 0.03 of one pair is 0.09 of three."""
    results = BASE + noisy("rowwise", 0.0052, 0.0025) + noisy("mxfp8", 0.0, 0.0)
    comparison = compared(results)
    raw = comparison.gap(("rowwise", 1.0, 1.0), ("bf16", 1.0, 1.0)).p_value
    (pair,) = [one for one in comparison.ranking(1.0, 1.0) if {one.better, one.worse} == {"bf16", "rowwise"}]
    assert 0.01 < raw < 0.05
    assert pair.p_value > 0.05


def test_the_ranking_corrects_the_larger_p_values():
    """Of five seeds without an effect of their own, where the windows' freedom would make differences surer."""
    comparison = compared(BASE + noisy("rowwise", 4e-5, 0.0) + noisy("mxfp8", 0.0, 0.0))
    names = ("bf16", "rowwise", "mxfp8")
    pairs = [((one, 1.0, 1.0), (other, 1.0, 1.0)) for one, other in itertools.combinations(names, 2)]
    expected = holm({str(pair): comparison.p_value(*pair) for pair in pairs})
    found = {pair.p_value for pair in comparison.ranking(1.0, 1.0)}
    assert sorted(found) == pytest.approx(sorted(set(expected.values())))
    assert any(comparison.p_value(*pair) > 1.001 * comparison.gap(*pair).p_value for pair in pairs)


@pytest.mark.parametrize("switch", [0.5, 0.8])
def test_no_slope_is_measured_across_a_change_of_precision(switch):
    """From 0.8 of the steps on, within the last third, it would be the change's own."""
    schedule = {"precision_schedule": (("bf16", 0.0), ("fp8", switch))}
    runs = []
    for seed in range(5):
        one = result("rowwise", seed, 4.0 + 0.01 * seed, slope=0.5 + 0.01 * seed)
        runs.append(replace(one, cell=replace(one.cell, variant=replace(one.cell.variant, training=schedule))))
    measures = compared(BASE + runs).measures(("rowwise", 1.0, 1.0))
    assert (measures.tail_slope is None) == (switch == 0.8)


def test_claims_are_tested_together():
    comparison = compared(BASE + noisy("rowwise", 0.0052, 0.0025) + noisy("mxfp8", 0.0, 0.001))
    claims = [
        Claim(text="", source="", better=("bf16", 1.0, 1.0), worse=(name, 1.0, 1.0)) for name in ("rowwise", "mxfp8")
    ]
    assert outcome(claims[0], comparison).verdict == "confirmed"
    alone = outcome(claims[0], comparison).p_value
    together = outcomes([(claim, comparison) for claim in claims * 2])[0]
    assert together.p_value == pytest.approx(4 * alone)
    assert together.verdict == "open"


@pytest.mark.parametrize("who", ["rowwise", "bf16"])
def test_a_claim_is_open_where_one_group_lost_seeds(who):
    results = [
        result(name, seed, 7.0 if name == who and seed == 4 else nats + 0.01 * seed)
        for name, nats in (("bf16", 4.0), ("rowwise", 4.01))
        for seed in range(5)
    ]
    claim = Claim(text="", source="", better=("bf16", 1.0, 1.0), worse=("rowwise", 1.0, 1.0))
    assert outcome(claim, compared(results)).verdict == "open"


def test_equal_runs_lose_nothing():
    runs = [result("bf16", seed, 4.0 + 0.01 * seed) for seed in range(3)]
    equal = [replace(one, cell=replace(one.cell, variant=Variant(name="other", recipe="bf16"))) for one in runs]
    claim = Claim(text="", source="", better=("bf16", 1.0, 1.0), worse=("other", 1.0, 1.0), loses_nothing=True)
    assert outcome(claim, compared(runs + equal)).verdict == "confirmed"


def test_variants_are_ranked_at_the_configurations_own_rate_if_it_is_there():
    results = [result(name, seed, 4.0, lr=lr) for lr in (0.5, 1.0) for name in ("bf16", "rowwise") for seed in range(2)]
    assert compared(results).factors == (1.0, 1.0)
    assert compared(results[:4]).factors == (0.5, 1.0)


@pytest.mark.parametrize(("gap", "verdict"), [(0.01, "confirmed"), (-0.01, "contradicted"), (0.0, "below the bar")])
def test_a_claim_is_decided_by_its_interval(gap, verdict):
    results = BASE + [result("rowwise", seed, 4.0 + gap + 0.01 * seed) for seed in range(5)]
    claim = Claim(text="", source="", better=("bf16", 1.0, 1.0), worse=("rowwise", 1.0, 1.0))
    found = outcome(claim, compared(results))
    assert found.verdict == verdict


@pytest.mark.parametrize("gap", [-0.002, 0.002])
def test_a_difference_is_tested_against_0_and_the_bar_bounds_both_of_its_ends(gap):
    """Decided inside of the bar; undecided and below a bar of the study's own, on either side of 0."""
    claim = Claim(text="", source="", better=("bf16", 1.0, 1.0), worse=("rowwise", 1.0, 1.0))
    sure = compared(BASE + noisy("rowwise", gap, 0.0002))
    assert outcome(claim, sure).verdict == ("confirmed" if gap > 0 else "contradicted")
    unsure = compared(BASE + noisy("rowwise", gap, 0.002), gap_nats=0.008)
    assert outcome(claim, unsure).verdict == "below the bar"


def test_a_difference_below_0_may_be_below_the_bar_with_its_upper_end():
    claim = Claim(text="", source="", better=("bf16", 1.0, 1.0), worse=("rowwise", 1.0, 1.0))
    runs = BASE + noisy("rowwise", -0.003, 0.0008)
    found = outcomes([(claim, compared(runs))], among=1000)[0]
    assert found.difference is not None
    assert -0.005 < found.difference.low < found.difference.high < 0
    assert found.verdict == "below the bar"


def test_a_single_short_run_is_named():
    comparison = compared([*BASE, result("rowwise", 0, 7.0)])
    notes = grid_tables.notes(comparison, [comparison.measures(group) for group in comparison.groups])
    assert notes[0].startswith("1 run of 6 ended no better than token frequencies")


@pytest.mark.parametrize("gap", [-0.005, 0.005])
def test_a_claim_whose_interval_leaves_the_bar_on_either_side_is_open(gap):
    claim = Claim(text="", source="", better=("bf16", 1.0, 1.0), worse=("rowwise", 1.0, 1.0))
    found = outcome(claim, compared(BASE + noisy("rowwise", gap, 0.004), gap_nats=0.0079))
    assert found.p_value is not None
    assert found.p_value > 0.05
    assert found.verdict == "open"


@pytest.mark.parametrize(("cost", "verdict"), [(0.02, "confirmed"), (0.0, "contradicted"), (0.01, "below the bar")])
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


def test_a_spike_is_six_deviations_above_the_median_of_the_32_before():
    """4.0 and 4.1 in turn: median 4.05, median distance 0.05, so that 6 · 1.4826 · 0.05 = 0.4448 lies between."""

    def with_loss(nats, *, at):
        losses = [4.0, 4.1] * 40
        losses[at] = nats
        return spikes(losses, height=6.0)

    assert [with_loss(nats, at=40) for nats in (4.49, 4.50)] == [0, 1]
    assert [with_loss(9.0, at=at) for at in (31, 32)] == [0, 1]


def with_run(one, **values):
    return replace(one, run=replace(one.run, **values))


def test_spikes_are_counted_in_a_thousand_steps():
    """One among the 100 steps of one run of five."""
    curve = tuple((step, 9.0 if step == 50 else 4.0 + 0.1 * (step % 2)) for step in range(1, STEPS + 1))
    others = [result("rowwise", seed, 4.0) for seed in range(5)]
    others[2] = with_run(others[2], train_curve=curve)
    assert compared(BASE + others).measures(("rowwise", 1.0, 1.0)).spikes == pytest.approx(2.0)


def test_the_variance_of_gradients_is_relative_to_the_baselines():
    base = [with_run(one, gradient_variance=2.0) for one in BASE]
    others = [with_run(result("rowwise", seed, 4.0), gradient_variance=3.0) for seed in range(5)]
    assert compared(base + others).measures(("rowwise", 1.0, 1.0)).gradient_variance.estimate == 1.5


@pytest.mark.parametrize(("spread", "where"), [(1.0, "inside"), (0.1, "outside")])
def test_the_bar_of_the_spread_is_a_multiple_of_it(spread, where):
    """0.002 nats and BF16's standard deviation of 0.0158."""
    comparison = compared(BASE + [result("rowwise", seed, 4.002 + 0.01 * seed) for seed in range(5)], spread=spread)
    verdict = comparison.verdict(comparison.measures(("rowwise", 1.0, 1.0)))
    assert verdict == f"within 0.005 nats, {where} the baseline's spread"


def seen(spread, seeds, level):
    """Share of 20,000 simulated studies that see 0.005 nats."""
    studies = 0.005 + spread * np.random.default_rng(7).standard_normal((20_000, seeds))
    return np.mean(stats.ttest_1samp(studies, 0, axis=1).pvalue < level)


@pytest.mark.parametrize("tests", [1, 20])
def test_the_seeds_of_a_claim_see_it_among_all_claims_and_with_its_baselines(tests):
    """The difference of differences spreads by 0.004 · 1.58 nats, what the groups lose themselves by less."""
    others = [*noisy("rowwise", 0.0, 0.002), *noisy("mxfp8", 0.0, -0.002), *noisy("delayed", 0.0, 0.0)]
    at = [(name, 1.0, 1.0) for name in ("rowwise", "mxfp8", "delayed", "bf16")]
    claim = Claim(text="", source="", better=at[1], worse=at[2], baselines=(at[0], at[3]))
    comparison = compared(BASE + others)
    found = outcomes([(claim, comparison)], among=tests)[0]
    spread = 0.004 * np.std(range(5), ddof=1)
    assert seen(spread, found.seeds_needed, 0.05 / tests) == pytest.approx(0.8, abs=0.04)
    assert outcomes([(claim, comparison)] * tests)[0].seeds_needed == found.seeds_needed


def test_notes_name_the_variant_with_the_most_spread_and_its_seeds():
    comparison = compared(BASE + noisy("mxfp8", 0.0, 0.008) + noisy("rowwise", 0.0, 0.002))
    measures = [comparison.measures(group) for group in comparison.groups]
    (note,) = grid_tables.notes(comparison, measures)
    needed = comparison.measures(("mxfp8", 1.0, 1.0)).seeds_needed
    assert f"mxfp8 needs {needed} paired seeds" in note
    assert seen(0.008 * np.std(range(5), ddof=1), needed, 0.05) == pytest.approx(0.8, abs=0.02)


def test_short_runs_that_count_as_diverged_are_named():
    """6 nats is the entropy of the token frequencies; a run that broke is diverged whatever it would have reached."""
    runs = [result(name, seed, 7.0 if seed else 4.0) for name in ("bf16", "rowwise") for seed in range(3)]
    comparison = compared([*runs, result("rowwise", 3, 4.0, failed_at=17)])
    measures = [comparison.measures(group) for group in comparison.groups]
    first, second = grid_tables.notes(comparison, measures)
    assert first.startswith("4 runs of 7 ended no better than token frequencies (6.0000 nats)")
    assert second.startswith("Rows have different numbers of seeds")
    assert [row[1] for row in grid_tables.gap_rows(comparison, measures)] == ["3 (2)", "4 (3)"]


def test_costs_are_printed_steps_first():
    others = [result("rowwise", seed, 4.0 + 0.01 * seed, faster=1.25, tokens_per_second=500.0) for seed in range(5)]
    comparison = compared(BASE + others, targets=(0.5,))
    (row,) = grid_tables.cost_rows([comparison.measures(("rowwise", 1.0, 1.0))])
    cells = dict(zip(grid_tables.cost_columns((0.5,)), row, strict=True))
    assert cells["steps to 50%"].startswith("0.80")
    assert cells["time to 50%"].startswith("1.60")


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

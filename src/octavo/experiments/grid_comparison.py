"""Comparison of a grid's variants with its baseline, over paired seeds and windows.

    gap         mean over seeds and windows of run − baseline; its interval, from two seeds on:
                :mod:`octavo.experiments.intervals`
    spread      standard deviation over seeds of the baseline's final loss
    tail slope  least-squares slope of the validation gap over the last ``bars.tail`` of the steps, nats in 1,000 steps
    spikes      training losses above median + bars.spike · 1.4826 · MAD of the 32 before, in 1,000 steps
    diverged    the loss became NaN or infinite, or ended at or above the unigram entropy

Diverged runs are counted; gaps and slopes are of the seeds that both finished. A variant that lost more of its seeds
than the baseline is within no bar, and runs that diverged in other seeds are not ranked.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from octavo.curves import difference
from octavo.experiments.bars import Bars
from octavo.experiments.cells import CellResult
from octavo.experiments.intervals import (
    CONFIDENCE,
    Interval,
    holm,
    paired_interval,
    paired_p_value,
    seeds_needed,
    slope,
    student_interval,
)
from octavo.training.comparison import RunMeasures, steps_to, value_at

__all__ = ["GridComparison", "Group", "Ranking", "VariantMeasures", "spikes"]

BEFORE = 32  # steps before one that may be a spike
MAD_TO_DEVIATION = 1.4826  # of a normal distribution
DETECTABLE_NATS = 0.005

Group = tuple[str, float, float]  # variant, factor of the learning rate, factor of the warm-up


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantMeasures:
    """Measures of one variant at one learning rate and warm-up, over its seeds.

    Attributes:
        group: variant and factors.
        seeds: number of runs.
        diverged: how many of them diverged.
        lost: how many more of them diverged than of the baseline's runs of the same seeds.
        nats: mean final loss over the seeds that did not.
        gap: gap to the baseline at the same factors; None for the baseline and without a common seed.
        spread: standard deviation over seeds of the baseline's final loss, nats; None with fewer than two.
        tail_slope: slope of the gap at the end, nats in 1,000 steps; None as for ``gap``, without two evaluations, or
            where a precision schedule changes within the tail.
        steps_to_targets: mean over seeds of steps to each target over the baseline's; None where one never came.
        seconds_to_targets: the same of seconds.
        spikes: in 1,000 steps.
        gradient_variance: mean over seeds, relative to the baseline's.
        gradient_error: median distance to the FP32 gradient.
        noise_scale: median, in micro-batches.
        tokens_per_second: median.
        peak_memory_bytes: largest.
        seeds_needed: paired seeds that would see 0.005 nats with a chance of 80 %; None with fewer than two seeds.
    """

    group: Group
    seeds: int
    diverged: int
    lost: int
    nats: float | None
    gap: Interval | None
    spread: float | None
    tail_slope: Interval | None
    steps_to_targets: tuple[Interval | None, ...]
    seconds_to_targets: tuple[Interval | None, ...]
    spikes: float
    gradient_variance: Interval | None
    gradient_error: float | None
    noise_scale: float | None
    tokens_per_second: float | None
    peak_memory_bytes: int | None
    seeds_needed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """A pair of variants: the better one first, with Holm's p-value over all pairs."""

    better: str
    worse: str
    difference: Interval
    p_value: float


class GridComparison:
    """Everything that a study's tables say, from the results of its cells.

    Args:
        results: finished cells.
        baseline: name of the variant that the others are measured against.
        bars: what counts as a loss.
        unigram_nats: entropy of the token frequencies.
    """

    def __init__(self, results: Iterable[CellResult], *, baseline: str, bars: Bars, unigram_nats: float) -> None:
        self.baseline, self.bars, self.unigram_nats = baseline, bars, unigram_nats
        self.groups: dict[Group, dict[int, CellResult]] = {}
        for result in results:
            cell = result.cell
            self.groups.setdefault((cell.variant.name, cell.lr, cell.warmup), {})[cell.seed] = result

    @property
    def factors(self) -> tuple[float, float]:
        """Factors of learning rate and warm-up at which variants are ranked and drawn: 1 if the grid has them."""
        every = [group[1:] for group in self.groups]
        return (1.0, 1.0) if (1.0, 1.0) in every else every[0]

    def has_diverged(self, result: CellResult) -> bool:
        """True for a run that broke, or that predicts no better than token frequencies."""
        return result.diverged or result.run.nats >= self.unigram_nats

    @property
    def untrained(self) -> int:
        """Number of runs that count as diverged only because they end no better than token frequencies."""
        results = [result for runs in self.groups.values() for result in runs.values()]
        return sum(self.has_diverged(result) and not result.diverged for result in results)

    def measures(self, group: Group) -> VariantMeasures:
        """The measures of a group."""
        runs = self._finished(group)
        base_group = (self.baseline, *group[1:])
        base = self._finished(base_group)
        pairs = self._pairs(group)
        gap = self.gap(group, base_group) if pairs else None
        results = self.groups[group].values()
        return VariantMeasures(
            group=group,
            seeds=len(results),
            diverged=sum(map(self.has_diverged, results)),
            lost=self._lost(group, base_group),
            nats=statistics.fmean(run.nats for run in runs.values()) if runs else None,
            gap=gap,
            spread=statistics.stdev(run.nats for run in base.values()) if len(base) > 1 else None,
            tail_slope=self._tail_slope(group),
            steps_to_targets=self._costs(pairs, lambda _: 1.0),
            seconds_to_targets=self._costs(pairs, lambda run: 1 / run.tokens_per_second),
            spikes=_rate(results, self.bars.spike),
            gradient_variance=_mean(
                run.gradient_variance / other.gradient_variance
                for run, other in pairs
                if run.gradient_variance is not None and other.gradient_variance
            ),
            gradient_error=self.gradient_error(group),
            noise_scale=_median(result.noise_scale for result in results),
            tokens_per_second=_median(run.tokens_per_second for run in runs.values()),
            peak_memory_bytes=max((run.peak_memory_bytes or 0 for run in runs.values()), default=0) or None,
            seeds_needed=self.seeds_needed(group, base_group) if pairs else None,
        )

    def gap(self, group: Group, base: Group, *beyond: Group) -> Interval | None:
        """Gap of one group over another on the seeds that all finished, without an interval from one; None from none.

        Args:
            group: whose loss is counted.
            base: whose loss is subtracted.
            beyond: none, or two groups whose gap is subtracted too.
        """
        if not (gaps := self._gaps(group, base, *beyond)):
            return None
        return paired_interval(gaps) if len(gaps) > 1 else student_interval([float(np.mean(gaps))])

    def p_value(self, group: Group, base: Group, *beyond: Group, truth: float = 0.0) -> float:
        """Probability of a gap at least this far from ``truth``, of at least two seeds; arguments as for ``gap``."""
        return paired_p_value(self._gaps(group, base, *beyond), truth)

    def seeds_needed(self, group: Group, base: Group, *beyond: Group, tests: int = 1) -> int | None:
        """Paired seeds that would see 0.005 nats with a chance of 80 %; None below two, or where runs diverged.

        Args:
            group: as for ``gap``, and so the following two.
            base: the other group.
            beyond: none, or two more.
            tests: number of differences that are tested together, of which this one is the surest.
        """
        if not self.finish_alike((group, base, *beyond)):
            return None
        gaps = [float(np.mean(each)) for each in self._gaps(group, base, *beyond)]
        level = (1 - CONFIDENCE) / tests
        return seeds_needed(statistics.stdev(gaps), DETECTABLE_NATS, level=level) if len(gaps) > 1 else None

    def _gaps(self, *groups: Group) -> list[NDArray[np.float64]]:
        """Differences of two groups, or of two and two, in each window of each seed that all finished."""
        runs = [self._finished(each) for each in groups]
        gaps = []
        for seed in sorted(set.intersection(*map(set, runs))):
            windows = [np.asarray(each[seed].window_nats) for each in runs]
            gaps.append(windows[0] - windows[1] - (windows[2] - windows[3] if len(windows) > 2 else 0.0))
        return gaps

    def finish_alike(self, groups: Iterable[Group]) -> bool:
        """Whether groups diverged in the same ones of the seeds that all have."""
        every = list(groups)
        common = set.intersection(*(set(self.groups.get(group, ())) for group in every))
        return len({frozenset(self._finished(group).keys() & common) for group in every}) == 1

    def gradient_error(self, group: Group) -> float | None:
        """Median distance to the FP32 gradient, over the seeds that did not diverge; None without one."""
        return _median(run.gradient_error for run in self._finished(group).values())

    def ranking(self, lr: float, warmup: float) -> list[Ranking]:
        """Every pair of variants at these factors, by p-value."""
        names = [name for name, *factors in self.groups if factors == [lr, warmup]]
        gaps = {
            (one, other): gap
            for one, other in itertools.combinations(names, 2)
            if self.finish_alike(pair := ((one, lr, warmup), (other, lr, warmup)))
            and (gap := self.gap(*pair))
            and not math.isnan(gap.error)
        }
        adjusted = holm({f"{one} {other}": self.p_value((one, lr, warmup), (other, lr, warmup)) for one, other in gaps})
        ranked = [
            Ranking(
                better=one if gap.estimate <= 0 else other,
                worse=other if gap.estimate <= 0 else one,
                difference=gap,
                p_value=adjusted[f"{one} {other}"],
            )
            for (one, other), gap in gaps.items()
        ]
        return sorted(ranked, key=lambda pair: pair.p_value)

    def verdict(self, measures: VariantMeasures) -> str:
        """Whether a variant loses accuracy, by both bars, in one sentence."""
        gap, bars = measures.gap, self.bars
        if measures.lost:
            return f"{measures.diverged} of {measures.seeds} runs diverged, {measures.lost} more than the baseline's"
        if gap is None:
            return "baseline" if measures.group[0] == self.baseline else "no seed that the baseline finished too"
        if math.isnan(gap.error):
            return "one seed: no interval"
        if gap.high <= bars.gap_nats:
            within = f"within {bars.gap_nats:g} nats"
        elif gap.low > bars.gap_nats:
            within = f"above {bars.gap_nats:g} nats"
        else:
            within = f"undecided at {bars.gap_nats:g} nats"
        if measures.spread is not None:
            inside = gap.high <= bars.spread * measures.spread
            within += f", {'inside' if inside else 'outside'} the baseline's spread"
        return f"{within}; the gap grows at the end" if measures.group in self._growing else within

    def is_within(self, measures: VariantMeasures) -> bool:
        """Whether the gap's interval ends within the bar, and no more seeds were lost than the baseline's."""
        return measures.gap is not None and not measures.lost and measures.gap.high <= self.bars.gap_nats

    def _finished(self, group: Group) -> dict[int, RunMeasures]:
        return {
            seed: result.run for seed, result in self.groups.get(group, {}).items() if not self.has_diverged(result)
        }

    def _pairs(self, group: Group) -> list[tuple[RunMeasures, RunMeasures]]:
        """A group's runs and the baseline's, of the seeds that both finished; none for the baseline."""
        runs, base = self._finished(group), self._finished((self.baseline, *group[1:]))
        common = [] if group[0] == self.baseline else sorted(runs.keys() & base.keys())
        return [(runs[seed], base[seed]) for seed in common]

    def _lost(self, group: Group, base: Group) -> int:
        common = self.groups[group].keys() & self.groups.get(base, {}).keys()
        finished, of_base = (len(self._finished(each).keys() & common) for each in (group, base))
        return max(0, of_base - finished)

    @cached_property
    def _growing(self) -> set[Group]:
        """Groups whose gap grows at the end, by Holm over all groups."""
        slopes = {group: self._tail_slope(group) for group in self.groups}
        p_values = holm({str(group): each.p_above_zero for group, each in slopes.items() if each and each.freedom > 0})
        return {group for group in slopes if p_values.get(str(group), 1.0) < 1 - CONFIDENCE}

    def _tail_slope(self, group: Group) -> Interval | None:
        if any(self._changes_in_tail(each) for each in (group, (self.baseline, *group[1:]))):
            return None
        slopes = []
        for run, other in self._pairs(group):
            start = (1 - self.bars.tail) * run.steps
            gaps = [point for point in difference(run.validation_curve, other.validation_curve) if point[0] >= start]
            if len(gaps) < 2:
                return None
            slopes.append(1000 * slope(*zip(*gaps, strict=True)))
        return student_interval(slopes) if slopes else None

    def _changes_in_tail(self, group: Group) -> bool:
        """Whether the precision changes within the tail, where a slope would be that of the change."""
        variants = (result.cell.variant for result in self.groups.get(group, {}).values())
        schedules = (variant.training.get("precision_schedule", ()) for variant in variants)
        return any(start > 1 - self.bars.tail for schedule in schedules for _, start in schedule)

    def _costs(
        self, pairs: Sequence[tuple[RunMeasures, RunMeasures]], cost: Callable[[RunMeasures], float]
    ) -> tuple[Interval | None, ...]:
        """Mean over seeds of the relative cost to each target; None where a seed did not reach it."""
        means = []
        for share in self.bars.targets:
            costs = [_cost_to(run, other, share, cost) for run, other in pairs]
            known = [each for each in costs if each is not None]
            means.append(_mean(known) if len(known) == len(costs) else None)
        return tuple(means)


def spikes(losses: Sequence[float], height: float) -> int:
    """Number of losses more than ``height`` robust deviations above the median of the 32 before.

    Example:
        >>> spikes([1.0, 1.1] * 20 + [3.0] + [1.0, 1.1] * 5, height=6.0)
        1
    """
    count = 0
    for index in range(BEFORE, len(losses)):
        before = np.asarray(losses[index - BEFORE : index])
        middle = float(np.median(before))
        deviation = MAD_TO_DEVIATION * float(np.median(np.abs(before - middle)))
        count += losses[index] > middle + height * deviation
    return count


def _rate(results: Iterable[CellResult], height: float) -> float:
    """Spikes in 1,000 steps of all runs."""
    curves = [[loss for _, loss in result.run.train_curve] for result in results]
    return 1000 * sum(spikes(losses, height) for losses in curves) / max(1, sum(map(len, curves)))


def _cost_to(run: RunMeasures, base: RunMeasures, share: float, cost: Callable[[RunMeasures], float]) -> float | None:
    """Cost until a run reaches the baseline's loss at a share of its steps, over the baseline's cost."""
    target = value_at(base.validation_curve, share * base.steps)
    steps, own = steps_to(run.validation_curve, target), steps_to(base.validation_curve, target)
    return None if steps is None or not own else steps * cost(run) / (own * cost(base))


def _mean(values: Iterable[float]) -> Interval | None:
    known = list(values)
    return student_interval(known) if known else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None

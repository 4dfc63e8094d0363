"""Published claims about FP8 training, and what a grid says of them.

A claim is an order of two groups of the grid: the first ends at a lower held-out loss than the second, or less far
above a baseline of its own. It is confirmed if their paired difference lies on the claimed side of 0 with a p-value
below 0.05, and contradicted if it lies on the other. p-values are Holm's over all claims that are tested together.
Otherwise the difference is below the bar if its 95 % interval lies within ± the study's bar (``bars.gap_nats``), and
open if not: more seeds, or a larger model, would have to decide.

A claim that the second group loses nothing is tested against the bar instead of 0. A claim is open where a group
diverged in a seed that another of its groups finished.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.experiments.grid_comparison import GridComparison, Group
from octavo.experiments.intervals import CONFIDENCE, Interval, holm

__all__ = ["VERDICTS", "Claim", "Outcome", "outcomes"]

VERDICTS = CONFIRMED, CONTRADICTED, BELOW_BAR, OPEN = "confirmed", "contradicted", "below the bar", "open"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claimed order.

    Attributes:
        text: the claim in one sentence.
        source: who says so.
        better: the group said to end at the lower loss.
        worse: the other one.
        baselines: groups that better and worse are counted from; None compares their losses.
        loses_nothing: whether the claim is that ``worse`` ends at most the study's bar above ``better``.
    """

    text: str
    source: str
    better: Group
    worse: Group
    baselines: tuple[Group, Group] | None = None
    loses_nothing: bool = False

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups whose difference it is of: worse, better, and their baselines."""
        return (self.worse, self.better, *(() if self.baselines is None else (self.baselines[1], self.baselines[0])))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Verdict of a grid on a claim.

    Attributes:
        claim: the claim.
        verdict: one of ``VERDICTS``.
        difference: worse − better, nats; None without a seed that all finished.
        p_value: of the difference, or of its distance to the bar, by Holm over all claims; None without an interval.
        seeds_needed: paired seeds that would see 0.005 nats with a chance of 80 % among all claims, if only this one is
            seen; None with fewer than two.
        gradient_errors: of the better and the worse group, the median distance of a gradient to FP32's at the run's
            final weights, over FP32's size. It shows what a cast costs one step, before the steps' chaos hides it.
    """

    claim: Claim
    verdict: str
    difference: Interval | None
    p_value: float | None
    seeds_needed: int | None
    gradient_errors: tuple[float | None, float | None]


def outcomes(tests: Sequence[tuple[Claim, GridComparison]], *, among: int = 0) -> list[Outcome]:
    """Test claims together, each on its grid.

    Args:
        tests: the claims and their grids.
        among: number of claims that were to be tested, if that is more: those that have no runs yet count as well.
    """
    among = max(among, len(tests))
    gaps = [comparison.gap(*claim.groups) for claim, comparison in tests]
    truths = [comparison.bars.gap_nats if claim.loses_nothing else 0.0 for claim, comparison in tests]
    p_values = holm(
        {
            str(index): comparison.p_value(*claim.groups, truth=truths[index])
            for index, ((claim, comparison), gap) in enumerate(zip(tests, gaps, strict=True))
            if gap is not None and not math.isnan(gap.error)
        },
        tests=among,
    )
    return [
        Outcome(
            claim=claim,
            verdict=_verdict(claim, comparison, gap, p_values.get(str(index))),
            difference=gap,
            p_value=p_values.get(str(index)),
            seeds_needed=comparison.seeds_needed(*claim.groups, tests=among),
            gradient_errors=(comparison.gradient_error(claim.better), comparison.gradient_error(claim.worse)),
        )
        for index, ((claim, comparison), gap) in enumerate(zip(tests, gaps, strict=True))
    ]


def _verdict(claim: Claim, comparison: GridComparison, gap: Interval | None, p_value: float | None) -> str:
    bar = comparison.bars.gap_nats
    if gap is None or p_value is None or not comparison.finish_alike(claim.groups):
        return OPEN
    if p_value < 1 - CONFIDENCE:
        is_above = gap.estimate > (bar if claim.loses_nothing else 0.0)
        return CONFIRMED if is_above != claim.loses_nothing else CONTRADICTED
    return BELOW_BAR if -bar <= gap.low and gap.high <= bar else OPEN

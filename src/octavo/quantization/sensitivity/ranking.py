"""How far the estimates rank (layer, choice) pairs as the truth does: Spearman's rank correlation.

    ρ = the correlation of the ranks, equal values sharing the mean of theirs

Only pairs that cost more than the floor count: below it the truth is noise, and its order means nothing. The pairs that
are run are the costliest half and others spread through the whole ranking, the widest range there is: among neighbours
estimates agree with the truth less well than over that range.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.quantization.sensitivity.screen import Key
from octavo.quantization.sensitivity.truth import Increase

__all__ = ["Agreement", "agreement_of"]

FEWEST = 3  # pairs; two have a rank correlation of 1 or -1, whatever they are


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Of estimates with what was measured.

    Attributes:
        rank_correlation: Spearman's; NaN for fewer than three pairs, or where one side is the same for all.
        pairs: how many it is of.
    """

    rank_correlation: float
    pairs: int


def agreement_of(estimates: Mapping[Key, float], measured: Mapping[Key, Increase], floor: Increase) -> Agreement:
    """Of the pairs that were measured and cost more than the floor."""
    true = {key: found.divergence for key, found in measured.items() if found.divergence > floor.divergence}
    guessed = [estimates[key] for key in true]
    if len(true) < FEWEST or len({*guessed}) == 1 or len({*true.values()}) == 1:
        return Agreement(rank_correlation=math.nan, pairs=len(true))
    correlation = statistics.correlation(_ranks(guessed), _ranks([*true.values()]))
    return Agreement(rank_correlation=correlation, pairs=len(true))


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]

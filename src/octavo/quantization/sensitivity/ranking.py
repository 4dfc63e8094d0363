"""Spearman's rank correlation between the estimated and measured costs of (layer, choice) pairs.

    ρ = the correlation of the ranks, with mean ranks for ties

Only pairs that cost more than the floor count: below it the measurement is noise. Half of the measured pairs are the
costliest and half are spread over the whole ranking; within a narrower range the agreement is lower.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.quantization.sensitivity.ablation import Increase
from octavo.quantization.sensitivity.fisher_estimate import Key

__all__ = ["RankAgreement", "agreement_of"]

FEWEST = 3  # pairs; the rank correlation of two is always 1 or -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAgreement:
    """Agreement of estimated with measured costs.

    Attributes:
        rank_correlation: Spearman's; NaN for fewer than three pairs, or if one side is constant.
        pairs: number of pairs.
    """

    rank_correlation: float
    pairs: int


def agreement_of(estimates: Mapping[Key, float], measured: Mapping[Key, Increase], floor: Increase) -> RankAgreement:
    """Compute the rank correlation of the measured pairs that cost more than the floor."""
    measured_costs = {
        key: increase.divergence for key, increase in measured.items() if increase.divergence > floor.divergence
    }
    estimated_costs = [estimates[key] for key in measured_costs]
    if len(measured_costs) < FEWEST or len({*estimated_costs}) == 1 or len({*measured_costs.values()}) == 1:
        return RankAgreement(rank_correlation=math.nan, pairs=len(measured_costs))
    correlation = statistics.correlation(_ranks(estimated_costs), _ranks([*measured_costs.values()]))
    return RankAgreement(rank_correlation=correlation, pairs=len(measured_costs))


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]

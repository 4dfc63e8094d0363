"""The distribution of |Δ log p| on the page of an agreement."""

import torch

from octavo.engines.token_scores import TokenScores
from octavo.reports.agreement import _above


def of(*deltas):
    delta = torch.tensor(deltas, dtype=torch.float64)
    return TokenScores(
        delta=delta, forward_kl=delta, reverse_kl=delta, log_ratio=delta, logit_squares=0.0, largest_logit=0.0
    )


def test_the_curve_has_the_share_of_tokens_above_each_value():
    assert _above([of(-0.5, 0.25), of(0.25, 0.0)]) == ([0.0, 0.25, 0.5], [0.75, 0.25, 0.0])
    assert _above([of(0.0, 0.0)]) == ([0.0], [0.0])

"""How a quantised model's predictions differ from a reference's, token by token.

From the logits of both over one window of text, with p the reference's probabilities and q the contestant's:

    nats        −log q(next token)                        mean over tokens; perplexity is its exponential
    agreement   1 where argmax q = argmax p               share of tokens
    divergence  KL(p ‖ q) = Σ_v p_v · (log p_v − log q_v) mean over tokens, in nats

Perplexity looks at the one token that the text has; two models may share it and still disagree everywhere else.
Agreement and divergence compare all that could have been said. A model of 49,152 tokens has 100 MB of FP32 logits a
window of 512, so nothing larger than ``ROWS`` rows of them is widened at once, and nothing outlives its window.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.curves import perplexity
from octavo.errors import ConfigError

__all__ = ["Scores", "WindowScore", "score_window"]

ROWS = 128  # tokens whose log-probabilities are made at once


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowScore:
    """Means over the tokens of one window; see the module's formulas."""

    nats: float
    agreement: float
    divergence: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """A contestant's scores on every window, all of them of the same number of tokens."""

    windows: tuple[WindowScore, ...]

    @property
    def window_nats(self) -> tuple[float, ...]:
        """Mean loss of each window, to be paired with another contestant's."""
        return tuple(window.nats for window in self.windows)

    @property
    def nats(self) -> float:
        """Mean loss of a token."""
        return _mean(self.window_nats)

    @property
    def perplexity(self) -> float:
        """exp(nats); infinite where that overflows."""
        return perplexity(self.nats)

    @property
    def agreement(self) -> float:
        """Share of tokens whose likeliest successor is the reference's."""
        return _mean([window.agreement for window in self.windows])

    @property
    def divergence(self) -> float:
        """Mean KL(reference ‖ contestant) of a token, in nats."""
        return _mean([window.divergence for window in self.windows])


@torch.no_grad()
def score_window(logits: Tensor, reference: Tensor, targets: Tensor) -> WindowScore:
    """Scores of one window, in FP32 by token and FP64 over tokens.

    Args:
        logits: the contestant's, [T, V], any float dtype.
        reference: the reference's, [T, V].
        targets: the tokens that follow, int64 [T].

    Raises:
        ConfigError: the shapes do not belong together.

    Example:
        >>> logits = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
        >>> score_window(logits, logits, torch.tensor([0, 1]))
        WindowScore(nats=0.6931471824645996, agreement=1.0, divergence=0.0)
    """
    if logits.shape != reference.shape or logits.shape[:1] != targets.shape or not len(targets):
        raise ConfigError(
            f"logits {tuple(logits.shape)}, reference {tuple(reference.shape)} and targets {tuple(targets.shape)} must "
            "be [T, V], [T, V] and [T] with T of at least 1"
        )
    parts = [
        _score_rows(*rows) for rows in zip(logits.split(ROWS), reference.split(ROWS), targets.split(ROWS), strict=True)
    ]
    nats, agreement, divergence = (torch.cat(found).double().mean().item() for found in zip(*parts, strict=True))
    return WindowScore(nats=nats, agreement=agreement, divergence=divergence)


def _score_rows(logits: Tensor, reference: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, agreement and divergence of each row, [R]."""
    log_q, log_p = logits.float().log_softmax(-1), reference.float().log_softmax(-1)
    nats = -log_q.gather(-1, targets[:, None])[:, 0]
    agreement = (log_q.argmax(-1) == log_p.argmax(-1)).float()
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    return nats, agreement, divergence


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)

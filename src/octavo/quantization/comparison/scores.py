"""Token-level difference between a quantized model's predictions and a reference's.

Computed from the logits of both over one window of text, with p the reference's probabilities and q the variant's:

    nats        −log q(next token)                        mean over tokens; perplexity is its exponential
    agreement   1 where argmax q = argmax p               share of tokens
    divergence  KL(p ‖ q) = Σ_v p_v · (log p_v − log q_v) mean over tokens, in nats

Perplexity depends on one token per position, the text's; two models may have the same perplexity and disagree on all
others. Agreement and divergence compare whole distributions. With a vocabulary of 49,152, the FP32 logits of a window
of 512 tokens take 100 MB, so at most ``ROWS`` rows are converted at once, and none are kept after their window.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.curves import perplexity
from octavo.errors import ConfigError

__all__ = ["Scores", "WindowScore", "score_window"]

ROWS = 128  # tokens whose log-probabilities are computed at once


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowScore:
    """Means over the tokens of one window; see the module's formulas."""

    nats: float
    agreement: float
    divergence: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Scores of one variant on every window; all windows have the same number of tokens."""

    windows: tuple[WindowScore, ...]

    @property
    def window_nats(self) -> tuple[float, ...]:
        """Mean loss of each window, for paired comparison with another variant."""
        return tuple(window.nats for window in self.windows)

    @property
    def nats(self) -> float:
        """Mean loss per token."""
        return _mean(self.window_nats)

    @property
    def perplexity(self) -> float:
        """exp(nats); infinite where that overflows."""
        return perplexity(self.nats)

    @property
    def agreement(self) -> float:
        """Share of positions whose most likely token is the reference's."""
        return _mean([window.agreement for window in self.windows])

    @property
    def divergence(self) -> float:
        """Mean KL(reference ‖ variant) per token, in nats."""
        return _mean([window.divergence for window in self.windows])


@torch.no_grad()
def score_window(logits: Tensor, reference: Tensor, targets: Tensor) -> WindowScore:
    """Score one window: FP32 per token, FP64 for the mean.

    Args:
        logits: of the variant, [T, V], any float dtype.
        reference: logits of the reference, [T, V].
        targets: the next tokens, int64 [T].

    Raises:
        ConfigError: the shapes do not match.

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
    nats, agreement, divergence = (torch.cat(rows).double().mean().item() for rows in zip(*parts, strict=True))
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

"""Difference of two engines' predictions on one window of text, token by token.

With p the trainer's distribution at a position, q the server's, and t the text's next token:

    |Δ log p|    |log p(t) − log q(t)|
    KL           Σ_v p_v (log p_v − log q_v) and the reverse, over the whole vocabulary
    r            p(s) / q(s) of a token s that is drawn from q, as a rollout's are
    k1, k3       −log r and r − 1 − log r, estimators of KL(q ‖ p): E_q[k1] = E_q[k3] = KL(q ‖ p)
    clipped      |r − 1| > 0.2, where PPO's clip begins
    sample size  (Σ r)² / (N Σ r²), the effective share of N tokens weighted by r

Estimators hold for tokens that the server drew; of tokens of any other text they estimate nothing. All sums are FP64:
equal logits give exactly 0.

References: Schulman, "Approximating KL Divergence" (2020); Schulman et al., arXiv 1707.06347, equation 7.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import DataError

__all__ = [
    "CLIP",
    "LARGEST_ROUNDING",
    "TokenScores",
    "divergences",
    "effective_share",
    "is_clipped",
    "k3_estimate",
    "log_probabilities",
    "quantile",
    "score_tokens",
    "text_log_probabilities",
]

CLIP = 0.2  # of PPO
LARGEST_ROUNDING = 0.25  # of a log-probability above 0: a step of BF16 logits of 32 and more
ROWS = 64  # positions whose probabilities are FP64 at a time: 25 MB of a vocabulary of 49,152


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Scores of each predicted token of a window, float64 [T], and of its logits.

    Attributes:
        delta: log p − log q of the text's token.
        forward_kl: KL(trainer ‖ server).
        reverse_kl: KL(server ‖ trainer).
        log_ratio: log r of a token drawn by the server.
        logit_squares: mean square of the logits' differences.
        largest_logit: largest magnitude of them.
    """

    delta: Tensor
    forward_kl: Tensor
    reverse_kl: Tensor
    log_ratio: Tensor
    logit_squares: float
    largest_logit: float

    @property
    def k1(self) -> Tensor:
        """Estimator −log r."""
        return -self.log_ratio

    @property
    def k3(self) -> Tensor:
        """Estimator r − 1 − log r."""
        return k3_estimate(self.log_ratio)

    @property
    def clipped(self) -> Tensor:
        """1 where PPO's clip begins, else 0."""
        return is_clipped(self.log_ratio).double()


def k3_estimate(log_ratio: Tensor) -> Tensor:
    """Estimator r − 1 − log r of each token's KL(server ‖ trainer), at least 0."""
    return torch.expm1(log_ratio) - log_ratio


def is_clipped(log_ratio: Tensor) -> Tensor:
    """True where |r − 1| is above :data:`CLIP`."""
    return torch.expm1(log_ratio).abs() > CLIP


def effective_share(log_ratio: Tensor) -> float:
    """(Σ r)² / (N Σ r²) of N tokens; 0 if every r is 0.

    Example:
        >>> effective_share(torch.zeros(4)), effective_share(torch.tensor([0.0, -torch.inf]))
        (1.0, 0.5)
    """
    if log_ratio.max() == -torch.inf:
        return 0.0
    weights = (log_ratio - log_ratio.max()).exp()  # a common factor cancels; this one cannot overflow
    return float(weights.sum().square() / (weights.numel() * weights.square().sum()))


def quantile(values: Tensor, share: float) -> float:
    """A quantile as ``torch.quantile`` interpolates it, of any number of values; infinity next to an infinite one.

    Args:
        values: float64 [N], at least one, without NaN and −inf.
        share: of the values that are below, 0 to 1.

    Example:
        >>> quantile(torch.tensor([0.0, 1.0, 3.0, torch.inf], dtype=torch.float64), 0.5)
        2.0
    """
    position = share * (len(values) - 1)
    below = math.floor(position)
    low, high = (values.kthvalue(rank + 1).values for rank in (below, math.ceil(position)))
    return math.inf if high.isinf() else float(low.lerp(high, position - below))


def score_tokens(trainer: Tensor, server: Tensor, targets: Tensor, generator: torch.Generator) -> TokenScores:
    """Compare logits [T, V] of both at positions whose next tokens are ``targets`` [T].

    Args:
        trainer: any floating dtype.
        server: likewise.
        targets: int64 [T].
        generator: on the CPU; draws the server's tokens.

    Raises:
        DataError: logits are not finite.

    Example:
        >>> logits = torch.zeros(1, 4)
        >>> scores = score_tokens(logits, logits, torch.tensor([2]), torch.Generator().manual_seed(0))
        >>> float(scores.forward_kl), float(scores.k3)
        (0.0, 0.0)
    """
    for side, logits in (("trainer", trainer), ("server", server)):
        if not logits.isfinite().all():
            raise DataError(f"the {side}'s logits have NaN or infinities; check the model's weights for them")
    columns: list[Tensor] = []
    squares, largest = 0.0, 0.0
    for ours, theirs, wanted in zip(trainer.split(ROWS), server.split(ROWS), targets.split(ROWS), strict=True):
        p, q = log_probabilities(ours), log_probabilities(theirs)
        drawn = torch.multinomial(q.exp().cpu(), 1, generator=generator).to(q.device)
        columns.append(
            torch.stack(
                [
                    (p - q).gather(1, wanted[:, None])[:, 0],
                    _divergence(p, q),
                    _divergence(q, p),
                    (p - q).gather(1, drawn)[:, 0],
                ]
            )
        )
        difference = ours.double() - theirs.double()
        squares += float(difference.square().sum())
        largest = max(largest, float(difference.abs().max()))
    delta, forward, reverse, log_ratio = torch.cat(columns, dim=1).cpu()
    return TokenScores(
        delta=delta,
        forward_kl=forward,
        reverse_kl=reverse,
        log_ratio=log_ratio,
        logit_squares=squares / trainer.numel(),
        largest_logit=largest,
    )


def log_probabilities(logits: Tensor) -> Tensor:
    """Log-probabilities [T, V] of logits, float64."""
    return logits.double().log_softmax(dim=-1)


def divergences(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q) at each position of two tensors of logits [T, V], float64 [T].

    Example:
        >>> divergences(torch.zeros(1, 4), torch.zeros(1, 4))
        tensor([0.], dtype=torch.float64)
    """
    parts = zip(p.split(ROWS), q.split(ROWS), strict=True)
    return torch.cat([_divergence(log_probabilities(a), log_probabilities(b)) for a, b in parts]).cpu()


def text_log_probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probability of each target, float64 [T], of logits [T, V].

    Example:
        >>> text_log_probabilities(torch.zeros(1, 4), torch.tensor([2])).exp()
        tensor([0.2500], dtype=torch.float64)
    """
    parts = zip(logits.split(ROWS), targets.split(ROWS), strict=True)
    return torch.cat([log_probabilities(part).gather(1, wanted[:, None])[:, 0] for part, wanted in parts]).cpu()


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q) of each row, Σ p (log p − log q) + q − p: terms of at least 0, so that no other row looks equal."""
    d = p - q
    terms = torch.where(d.abs() < 1, p.exp() * (torch.expm1(-d) + d), p.exp() * d + q.exp() - p.exp())
    return torch.where(p.exp() > 0, terms, q.exp()).clamp(min=0).sum(dim=-1)

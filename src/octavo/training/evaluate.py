"""Held-out loss: the mean negative log-likelihood of a split's tokens, in nats.

The split is read in windows that do not overlap; each token is predicted once, from 0 to context − 1 preceding tokens
in its window. Losses are averaged in FP32 within a window and in FP64 over windows. The means of the windows are kept
for paired comparisons of models.

``unigram_entropy`` is the loss of a model that predicts the token frequencies of the split: an upper bound for a useful
language model.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.curves import perplexity
from octavo.nn.tensor_parallel import whole
from octavo.parallel.ranks import ALONE, Ranks
from octavo.text.corpus import Split
from octavo.text.tokens import TokenData

__all__ = ["Evaluation", "evaluate", "token_loss", "unigram_entropy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A model's loss on held-out tokens.

    Attributes:
        nats: mean loss per token.
        tokens: number of predicted tokens.
        window_nats: mean loss of each window.
    """

    nats: float
    tokens: int
    window_nats: tuple[float, ...]

    @property
    def perplexity(self) -> float:
        """exp(nats); infinite on overflow."""
        return perplexity(self.nats)


def token_loss(logits: Tensor, targets: Tensor, *, reduction: str = "mean") -> Tensor:
    """Cross-entropy in FP32 of logits [B, T, V] and targets [B, T]; reduction "none" gives [B, T].

    Where ranks share the vocabulary, forward and backward run inside of torch's ``loss_parallel``.
    """
    loss = whole(F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction=reduction))
    return loss if reduction != "none" else loss.view_as(targets)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: TokenData,
    *,
    context: int,
    split: Split = Split.VALIDATION,
    max_tokens: int | None = None,
    batch_size: int = 16,
    surroundings: AbstractContextManager[object] | None = None,
    ranks: Ranks = ALONE,
) -> Evaluation:
    """Loss of ``model`` on a split.

    Args:
        model: tokens [B, T] to logits [B, T, V].
        data: the token files.
        context: tokens per window.
        split: split to evaluate.
        max_tokens: see :meth:`TokenData.windows`.
        batch_size: windows per forward pass.
        surroundings: a reusable context such as autocast, or None.
        ranks: ranks that share the forward passes; all of them get the result.

    Raises:
        DataError: the split is shorter than the context.
    """
    inputs, targets = data.windows(context, split=split, max_tokens=max_tokens)
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    losses, starts = [], range(0, len(inputs), batch_size)
    try:
        for first in range(0, len(starts), ranks.data_size):  # as many on each rank: a sharded model's are collective
            start = starts[min(first + ranks.data_rank, len(starts) - 1)]
            rows = slice(start, start + batch_size)
            with surroundings or nullcontext():
                logits = model(inputs[rows].to(device))
            losses.append(token_loss(logits, targets[rows].to(device), reduction="none").mean(1).cpu())
    finally:
        model.train(was_training)
    rounds = zip(*ranks.gathered(losses)[:: ranks.tensor], strict=True)
    window_means = torch.cat([loss for losses_of_ranks in rounds for loss in losses_of_ranks][: len(starts)]).double()
    return Evaluation(nats=window_means.mean().item(), tokens=targets.numel(), window_nats=tuple(window_means.tolist()))


def unigram_entropy(data: TokenData, split: Split = Split.VALIDATION, *, max_tokens: int | None = None) -> float:
    """−Σ p log p over the token frequencies of the split itself, or of its beginning, in nats; 0 for an empty split.

    Example: two tokens equally often give log 2 = 0.693 nats.
    """
    counts = np.bincount(data.splits[split][:max_tokens])
    frequencies = counts[counts > 0] / max(1, counts.sum())
    return float(-(frequencies * np.log(frequencies)).sum())

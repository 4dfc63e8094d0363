"""Held-out loss against probabilities worked out by hand."""

import math
from collections import Counter
from itertools import pairwise

import pytest
import torch

from octavo.text.corpus import Split
from octavo.training.evaluate import Evaluation, evaluate, token_loss, unigram_entropy


class Bigram(torch.nn.Module):
    """Logits are a row of a random table, so a token's probability depends on the one before it alone."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(300, 300))

    def forward(self, tokens):
        return self.table[tokens]


def by_hand(model, data, tokens):
    """−log of every softmax probability in FP64, one token at a time."""
    table = model.table.detach().double()
    ids = data.splits[Split.VALIDATION].tolist()
    total = 0.0
    for before, after in pairwise(ids[: tokens + 1]):
        row = table[before]
        total -= math.log(math.exp(row[after]) / row.exp().sum().item())
    return total / tokens


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_mean_negative_log_likelihood(data, batch_size):
    model = Bigram()
    result = evaluate(model, data, context=13, batch_size=batch_size)
    assert result.tokens == (len(data.splits[Split.VALIDATION]) - 1) // 13 * 13
    assert result.nats == pytest.approx(by_hand(model, data, result.tokens), rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(result.nats))
    assert len(result.window_nats) == result.tokens // 13
    assert sum(result.window_nats) / len(result.window_nats) == pytest.approx(result.nats, rel=1e-12)


def test_first_window_is_its_own_mean(data):
    model = Bigram()
    assert evaluate(model, data, context=13).window_nats[0] == pytest.approx(by_hand(model, data, 13), rel=1e-6)


def test_runs_inside_its_surroundings_and_keeps_training_mode(data):
    entered = []

    class Reusable:
        def __enter__(self):
            entered.append(torch.is_grad_enabled())

        def __exit__(self, *_):
            return None

    model = Bigram().train()
    evaluate(model, data, context=13, batch_size=8, max_tokens=13 * 16, surroundings=Reusable())
    assert entered == [False, False]
    assert model.training


def test_low_precision_logits_are_widened_before_the_loss():
    logits = torch.full((1, 1, 4096), 20.0).bfloat16()
    assert token_loss(logits, torch.zeros(1, 1, dtype=torch.long)).item() == pytest.approx(math.log(4096), rel=1e-6)


def test_hopeless_loss_has_infinite_perplexity():
    assert Evaluation(nats=1e4, tokens=1, window_nats=(1e4,)).perplexity == math.inf


def test_unigram_entropy_by_counting(data):
    counts = Counter(data.splits[Split.TEST].tolist())
    total = sum(counts.values())
    assert unigram_entropy(data, Split.TEST) == pytest.approx(
        -sum(count / total * math.log(count / total) for count in counts.values())
    )

"""Scores against the formulas, one token after the other in FP64."""

import math

import pytest
import torch

from octavo.errors import ConfigError
from octavo.quantization.comparison import scores
from octavo.quantization.comparison.scores import Scores, WindowScore, score_window


def by_hand(logits, reference, targets):
    """Loss, agreement and divergence as a loop over tokens and the vocabulary's probabilities."""
    nats, agree, divergence = [], [], []
    for q_row, p_row, target in zip(logits.double(), reference.double(), targets.tolist(), strict=True):
        q, p = torch.softmax(q_row, 0), torch.softmax(p_row, 0)
        nats.append(-math.log(q[target]))
        agree.append(float(q_row.argmax() == p_row.argmax()))
        divergence.append(sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True)))
    return (math.fsum(found) / len(found) for found in (nats, agree, divergence))


@pytest.mark.parametrize("count", [1, 5, 2 * scores.ROWS + 3])
def test_a_window_is_the_mean_of_its_tokens(count):
    reference = 3 * torch.randn(count, 40)
    logits = reference + 0.5 * torch.randn(count, 40)
    targets = torch.randint(0, 40, (count,))
    found = score_window(logits, reference, targets)
    nats, agreement, divergence = by_hand(logits, reference, targets)
    assert found.nats == pytest.approx(nats, rel=1e-6)
    assert found.agreement == pytest.approx(agreement, abs=1e-12)
    assert found.divergence == pytest.approx(divergence, rel=1e-5)
    assert found.divergence > 0


def test_divergence_is_of_the_reference_from_the_contestant():
    """KL is not symmetric: a reference that is sure, a contestant that is not, and the reverse."""
    sure, open_ = torch.tensor([[0.0, math.log(9.0)]]), torch.tensor([[0.0, 0.0]])
    target = torch.tensor([1])
    one, other = (score_window(a, b, target).divergence for a, b in ((open_, sure), (sure, open_)))
    assert one == pytest.approx(0.1 * math.log(0.2) + 0.9 * math.log(1.8), rel=1e-5)
    assert other == pytest.approx(0.5 * math.log(5.0) + 0.5 * math.log(5 / 9), rel=1e-5)


def test_sixteen_bit_logits_are_widened():
    logits = torch.randn(7, 50).bfloat16()
    targets = torch.randint(0, 50, (7,))
    assert score_window(logits, logits, targets) == score_window(logits.float(), logits.float(), targets)


def test_a_loss_of_nan_is_seen():
    logits = torch.tensor([[0.0, math.nan]])
    found = Scores(windows=(score_window(logits, torch.zeros(1, 2), torch.tensor([0])),))
    assert math.isnan(found.nats)
    assert not found.perplexity < math.inf


def test_windows_are_averaged():
    windows = tuple(WindowScore(nats=n, agreement=a, divergence=d) for n, a, d in ((1.0, 0.5, 0.2), (3.0, 1.0, 0.0)))
    found = Scores(windows=windows)
    assert (found.nats, found.agreement, found.divergence) == (2.0, 0.75, 0.1)
    assert found.perplexity == math.exp(2.0)
    assert found.window_nats == (1.0, 3.0)
    assert Scores(windows=(WindowScore(nats=800.0, agreement=0.0, divergence=0.0),)).perplexity == math.inf


def test_shapes_that_do_not_belong_together():
    for shapes in (((3, 5), (3, 5), (2,)), ((3, 5), (3, 4), (3,)), ((0, 5), (0, 5), (0,))):
        logits, reference, targets = (torch.zeros(shape) for shape in shapes)
        with pytest.raises(ConfigError, match="must be"):
            score_window(logits, reference, targets.long())

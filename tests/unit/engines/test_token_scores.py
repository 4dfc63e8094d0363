"""Scores of tokens against plain formulas in FP64, written once more with NumPy."""

import math

import numpy as np
import pytest
import torch

from octavo.engines.token_scores import divergences, quantile, score_tokens, text_log_probabilities

ROWS, VOCABULARY = 150, 40  # more rows than one part


@pytest.fixture
def pair():
    generator = torch.Generator().manual_seed(0)
    ours = 3 * torch.randn(ROWS, VOCABULARY, generator=generator)
    theirs = ours + 0.3 * torch.randn(ROWS, VOCABULARY, generator=generator)
    return ours.bfloat16(), theirs.bfloat16(), torch.randint(VOCABULARY, (ROWS,), generator=generator)


def log_softmax(logits):
    x = logits.double().numpy()
    return np.array(
        [[v - max(row) - math.log(sum(math.exp(each - max(row)) for each in row)) for v in row] for row in x]
    )


def test_every_score_is_its_formula(pair):
    ours, theirs, targets = pair
    p, q = log_softmax(ours), log_softmax(theirs)
    scores = score_tokens(ours, theirs, targets, torch.Generator().manual_seed(1))
    delta = [p[row, token] - q[row, token] for row, token in enumerate(targets)]
    np.testing.assert_allclose(scores.delta, delta, atol=1e-12)
    np.testing.assert_allclose(scores.forward_kl, (np.exp(p) * (p - q)).sum(1), atol=1e-12)
    np.testing.assert_allclose(scores.reverse_kl, (np.exp(q) * (q - p)).sum(1), atol=1e-12)
    np.testing.assert_allclose(divergences(ours, theirs), (np.exp(p) * (p - q)).sum(1), atol=1e-12)
    np.testing.assert_allclose(text_log_probabilities(theirs, targets), [q[r, t] for r, t in enumerate(targets)])
    difference = ours.double().numpy() - theirs.double().numpy()
    assert scores.logit_squares == pytest.approx((difference**2).mean())
    assert scores.largest_logit == np.abs(difference).max()
    ratio = np.exp(scores.log_ratio.numpy())
    np.testing.assert_allclose(scores.k1, -np.log(ratio), atol=1e-12)
    np.testing.assert_allclose(scores.k3, ratio - 1 - np.log(ratio), atol=1e-12)
    np.testing.assert_array_equal(scores.clipped, np.abs(ratio - 1) > 0.2)


def test_estimators_of_the_servers_tokens_have_the_mean_of_its_kl(pair):
    ours, theirs, targets = (each[:1] for each in pair)
    many = 20_000
    scores = score_tokens(
        ours.expand(many, -1), theirs.expand(many, -1), targets.expand(many), torch.Generator().manual_seed(2)
    )
    exact = float(scores.reverse_kl[0])
    for estimate in (scores.k1, scores.k3):
        assert abs(float(estimate.mean()) - exact) < 4 * float(estimate.std()) / math.sqrt(many)
    weights = scores.log_ratio.exp()
    assert abs(float(weights.mean()) - 1) < 4 * float(weights.std()) / math.sqrt(many)


def test_equal_logits_differ_by_exactly_nothing(pair):
    ours, _, targets = pair
    scores = score_tokens(ours, ours.clone(), targets, torch.Generator().manual_seed(0))
    for values in (scores.delta, scores.forward_kl, scores.reverse_kl, scores.k1, scores.k3, scores.clipped):
        assert (values == 0).all()
    assert scores.logit_squares == scores.largest_logit == 0


def test_impossible_tokens_add_nothing():
    ours = torch.tensor([[0.0, 0.0, -math.inf]])
    assert divergences(ours, torch.zeros(1, 3)).item() == pytest.approx(math.log(3 / 2))
    assert divergences(torch.zeros(1, 3), ours).item() == math.inf
    assert divergences(ours, ours).item() == 0


@pytest.mark.parametrize("far", [2.0, 30.0, 710.0, 730.0, 760.0, 3000.0])  # e**-745 is the last number above 0
def test_far_distributions_have_the_kl_of_the_formula(far):
    p, q = torch.tensor([[far, 0.0, 1.0]]), torch.tensor([[0.0, far, 1.0]])
    ours, theirs = log_softmax(p)[0], log_softmax(q)[0]
    expected = sum(math.exp(a) * (a - b) for a, b in zip(ours, theirs, strict=True))
    assert divergences(p, q).item() == pytest.approx(expected, rel=1e-12)


def test_logits_a_bit_apart_have_a_kl_above_0():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 512, generator=generator)
    other = logits.clone()
    moved = torch.randint(512, (300,), generator=generator)
    other[torch.arange(300), moved] = torch.nextafter(other[torch.arange(300), moved], torch.tensor(torch.inf))
    p, change = logits.double().softmax(-1), other.double() - logits.double()
    share, step = p[torch.arange(300), moved], change[torch.arange(300), moved]
    expected = share * (1 - share) * step**2 / 2  # to second order
    found = divergences(logits, other)
    assert expected.min() > 0
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("size", [1, 2, 3, 100, 1001])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99, 1.0])
def test_a_quantile_is_torchs(size, share):
    values = torch.rand(size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    for infinite in (0, 1, size // 2, size):
        values[:infinite] = torch.inf
        expected = values.quantile(share).nan_to_num(nan=torch.inf, posinf=torch.inf)
        assert quantile(values, share) == float(expected)


def test_a_quantile_of_more_numbers_than_torchs_takes():
    values = torch.arange(2**24 + 2, dtype=torch.float64)
    assert quantile(values, 0.5) == (2**24 + 1) / 2

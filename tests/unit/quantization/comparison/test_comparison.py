"""A comparison against a plain loop over windows in torch."""

import math
import weakref
from itertools import permutations
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError
from octavo.quantization.comparison.comparison import compare
from octavo.quantization.comparison.variants import FormatVariant, high_precision, line_up
from tests.unit.quantization.tiny_models import LINEARS, language_model, windows

NAMES = ["fp32", "bf16", "fp8-dynamic"]


@pytest.fixture(scope="module")
def contestants():
    return line_up(language_model(), NAMES)


def test_comparison_equals_a_loop_over_windows(contestants):
    """Perplexity, agreement and divergence of all tokens at once; the paired gap from each window's mean."""
    text = windows(5)
    found = compare(contestants, text)
    logits = {c.name: torch.stack([c.logits(row[None, :-1])[0] for row in text]).double() for c in contestants}
    log_p = logits["bf16"].log_softmax(-1)
    for name in NAMES:
        log_q = logits[name].log_softmax(-1)
        nats = -log_q.gather(-1, text[:, 1:, None])[..., 0]
        scores = found.entry(name).scores
        assert scores.perplexity == pytest.approx(math.exp(nats.mean()), rel=1e-6)
        assert scores.window_nats == pytest.approx(nats.mean(1).tolist(), rel=1e-6)
        assert scores.agreement == pytest.approx((log_p.argmax(-1) == log_q.argmax(-1)).double().mean().item())
        divergence = (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()
        assert scores.divergence == pytest.approx(divergence, rel=1e-3, abs=1e-6)
    base, other = (torch.tensor(found.entry(name).scores.window_nats) for name in ("bf16", "fp8-dynamic"))
    gap = found.gap("fp8-dynamic")
    assert gap.nats == pytest.approx((other - base).mean().item(), rel=1e-4)
    assert gap.standard_error == pytest.approx(((other - base).std() / math.sqrt(5)).item(), rel=1e-4)
    assert found.tokens == 5 * 23
    assert found.share_of_bytes("fp8-dynamic") < 1 < found.share_of_bytes("fp32") == 2
    assert [entry.quantized for entry in found.entries] == [0, 0, LINEARS]


def test_the_reference_is_as_itself(contestants):
    found = compare(contestants, windows())
    own = found.entry("bf16").scores
    assert (own.agreement, own.divergence) == (1.0, 0.0)
    assert found.gap("bf16").nats == 0
    assert found.entry("fp8-dynamic").scores.divergence > found.entry("fp32").scores.divergence > 0


def test_the_reference_runs_once_a_window(contestants, monkeypatch):
    calls = []

    def told(self, tokens):
        calls.append(self.name)
        return torch.zeros(1, 23, 300)

    monkeypatch.setattr(FormatVariant, "logits", told)
    seen = []
    compare(contestants, windows(2), advance=lambda done, total: seen.append((done, total)))
    assert sorted(calls) == sorted(2 * NAMES)
    assert seen == [(done, 6) for done in range(1, 7)]


def test_memory_is_of_two_contestants(contestants, monkeypatch):
    """When a contestant's logits begin, the reference's of the same window alone are alive."""
    alive: list[Any] = []
    own = FormatVariant.logits

    def watched(self, tokens):
        held = [name for name, logits in alive if logits() is not None]
        assert held == ([] if self.name == "bf16" else ["bf16"])
        logits = own(self, tokens).clone()  # no view: what is cut from it keeps it alive
        alive.append((self.name, weakref.ref(logits)))
        return logits

    monkeypatch.setattr(FormatVariant, "logits", watched)
    for order in permutations(contestants):
        alive.clear()
        compare(order, windows(3))
        assert len(alive) == 9


def test_comparison_accepts_another_reference_variant(contestants):
    assert compare(contestants[:1], windows(1), reference="fp32").entry("fp32").scores.divergence == 0


def test_invalid_variants_and_windows_are_refused(contestants):
    with pytest.raises(ConfigError, match="include 'bf16', not fp32"):
        compare(contestants[:1], windows())
    with pytest.raises(ConfigError, match="must be distinct"):
        compare([*contestants, high_precision(language_model(), "fp32")], windows())
    for bad in (windows()[0], windows(1, 1), windows()[:0]):
        with pytest.raises(ConfigError, match=r"windows are \[count, length\]"):
            compare(contestants, bad)

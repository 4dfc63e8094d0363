"""Attention in the doctor: errors of logits that grow, and gradients whose codes do not add up to zero."""

import pytest
import torch

import octavo
import octavo.doctor
from octavo.doctor import Severity
from octavo.doctor.rules.attention import attention_gradient, attention_logits
from octavo.doctor.series import Sample, series_of
from octavo.doctor.thresholds import Thresholds
from octavo.nn import DotProductAttention
from octavo.recipes import Recipe


class Block(torch.nn.Module):
    def __init__(self, recipe: str | Recipe | None) -> None:
        super().__init__()
        self.out = octavo.nn.Linear(16, 16)
        self.attention = DotProductAttention(recipe=recipe)


def sampled(recipe, operands, steps=3):
    q, k, v, grad = operands
    block = Block(recipe)
    watcher = octavo.doctor.watch(block, interval=1)
    for _ in range(steps):
        with watcher.step():
            y = block.attention(q, k, v)
            (y * grad).sum().backward()
    assert block.attention.watch is None
    return watcher


def numbers(watcher):
    modules = watcher.samples[-1].modules
    return {name: modules[name]["attention"] for name in modules if name.startswith("attention")}


def tensors(logits=1.0, positions=64, width=32):
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, positions, 2, width) for _ in range(4))
    return (q * logits).requires_grad_(), k, v, grad


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_random_queries_and_keys_are_healthy(recipe):
    watcher = sampled(recipe, tensors())
    found = numbers(watcher)
    assert 1e-5 < found["attention_divergence"] < 0.005
    assert 2 < found["attention_logit"] < 8
    assert found["attention_gradient_imbalance"] < 0.08
    assert not [one for one in watcher.findings() if one.code.startswith("attention")]


def test_the_divergence_is_that_of_the_probabilities():
    q, k, v, grad = tensors(4.0)
    found = numbers(sampled("tensorwise", (q, k, v, grad), steps=1))
    rows = []
    hidden = ~torch.ones(64, 64, dtype=torch.bool).tril()
    for b in range(2):
        for h in range(2):
            pair = [each[b, :, h].detach() for each in (q, k)]
            codes = [octavo.quantize(each, octavo.E4M3).dequantize() for each in pair]
            exact, rounded = (
                ((x.double() @ y.double().t()) / 32**0.5).masked_fill(hidden, -torch.inf).log_softmax(-1)
                for x, y in (pair, codes)
            )
            rows.append((exact.exp() * (exact - rounded).masked_fill(hidden, 0)).sum(-1))
    assert found["attention_divergence"] == pytest.approx(torch.stack(rows).mean().item(), rel=1e-3)


def test_grown_logits_are_found():
    (finding,) = [one for one in sampled("tensorwise", tensors(40.0)).findings() if one.code == "attention-logits"]
    assert finding.path == "attention"
    assert finding.evidence["logit"] > 80
    assert any("bf16" in remedy.text for remedy in finding.remedies)


def test_small_gradients_of_one_sign_become_zero_with_one_scale_a_head_and_a_scale_a_row_heals_it():
    """Of queries that see almost one key alone, whose gradients are small beside those of others."""
    watcher = sampled("tensorwise", tensors(40.0))
    (finding,) = [one for one in watcher.findings() if one.code == "attention-gradient"]
    assert any("rowwise" in remedy.text for remedy in finding.remedies)
    healed = sampled("rowwise", tensors(40.0))
    assert numbers(healed)["attention_gradient_imbalance"] < numbers(watcher)["attention_gradient_imbalance"] / 5
    assert "attention-gradient" not in {one.code for one in healed.findings()}


def series_with(name, values):
    modules = [{name: {"a": value}, "attention_logit": {"a": 10 * value}} for value in values]
    samples = [Sample(step=step, casts={}, products={}, parameters={}, modules=m) for step, m in enumerate(modules, 1)]
    return series_of([], samples)


@pytest.mark.parametrize(
    ("rule", "name", "warn", "fail"),
    [
        (attention_logits, "attention_divergence", 0.1, 0.6),
        (attention_gradient, "attention_gradient_imbalance", 0.2, 0.6),
    ],
)
def test_when_they_are_found(rule, name, warn, fail):
    def severities(values):
        return [one.severity for one in rule(series_with(name, values), Thresholds())]

    assert severities([0.01, warn, warn, warn]) == [Severity.WARN]
    assert severities([0.01, warn, warn, fail]) == [Severity.FAIL]
    assert severities([0.01, warn, 0.01, warn]) == []
    (finding,) = rule(series_with(name, [0.01, warn, warn, warn]), Thresholds())
    assert (finding.first_step, finding.last_step) == (2, 4)

"""Rollouts, log-probabilities and mismatch against exact distributions and other libraries' formulas."""

import math
from typing import Any, cast

import numpy as np
import pytest
import torch

from octavo.engines import get, input_amaxes, model_as
from octavo.engines.token_scores import divergences
from octavo.errors import ConfigError
from octavo.models import Llama, LlamaConfig
from octavo.rl import MismatchMonitor, log_probs, mismatch, sample_rollout

VOCABULARY = 24


@pytest.fixture(scope="module")
def policy():
    torch.manual_seed(0)
    llama = Llama(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1,
            max_positions=32,
        )
    )  # fmt: skip
    with torch.no_grad():
        llama.lm_head.weight.mul_(8)  # a distribution that is not flat
    return llama


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_log_probs_are_the_negative_cross_entropy_of_each_token(policy):
    tokens = torch.randint(VOCABULARY, (3, 9), generator=seeded())
    with torch.no_grad():
        logits = policy(tokens[:, :-1]).double()
    expected = -torch.nn.functional.cross_entropy(logits.mT / 0.7, tokens[:, 1:], reduction="none")
    torch.testing.assert_close(log_probs(policy, tokens, temperature=0.7), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("profile", ["vllm-token", "vllm-block-ue8m0", "octavo-token"])
def test_a_rollout_keeps_the_log_probabilities_of_a_teacher_forced_pass(policy, profile):
    drawn = sample_rollout(
        policy, torch.tensor([[1, 2], [3, 4]]), max_new_tokens=6, profile=profile, generator=seeded()
    )
    engine = model_as(policy, get(profile))
    again = log_probs(engine, drawn.tokens)
    assert torch.equal(again[drawn.mask], drawn.log_probs[drawn.mask])
    assert torch.equal(log_probs(policy, drawn.tokens, profile=profile), again)
    assert not torch.equal(log_probs(policy, drawn.tokens)[drawn.mask], drawn.log_probs[drawn.mask])


@pytest.mark.parametrize("profile", ["vllm-tensor", "te-delayed", "modelopt"])
@pytest.mark.parametrize("texts", [None, [[9, 8, 7, 6, 5], [1, 0, 3, 2, 20]]])
def test_an_engine_with_calibrated_scales_agrees_with_itself(policy, profile, texts):
    prompts = torch.tensor([[1, 2], [3, 4]])
    calibration = None if texts is None else torch.tensor(texts)
    drawn = sample_rollout(
        policy, prompts, max_new_tokens=6, profile=profile, calibration=calibration, generator=seeded()
    )
    again = log_probs(policy, drawn.tokens, profile=profile, calibration=prompts if texts is None else calibration)
    assert torch.equal(again[drawn.mask], drawn.log_probs[drawn.mask])
    assert not torch.equal(log_probs(policy, drawn.tokens, profile=profile, calibration=drawn.tokens), again)


def test_calibrated_scales_are_those_of_the_whole_texts(policy):
    """The last token too, whose inputs have the largest magnitudes here."""
    texts = torch.tensor([[5, 6, 7, 8, 12]])
    profile, tokens = get("vllm-tensor"), torch.tensor([[1, 2, 3, 4]])
    amaxes, without = input_amaxes(policy, texts), input_amaxes(policy, texts[:, :-1])
    assert any(amaxes[path] > without[path] for path in amaxes)
    expected = log_probs(model_as(policy, profile, input_amaxes=amaxes), tokens)
    assert torch.equal(log_probs(policy, tokens, profile=profile, calibration=texts), expected)
    drawn = sample_rollout(policy, tokens, max_new_tokens=1, profile=profile, calibration=texts, generator=seeded())
    again = log_probs(model_as(policy, profile, input_amaxes=amaxes), drawn.tokens)
    assert torch.equal(drawn.log_probs[drawn.mask], again[drawn.mask])


def test_tokens_are_drawn_from_the_engine_at_the_temperature(policy):
    """10,000 first tokens have the engine's frequencies by a chi-squared test."""
    count, temperature = 10_000, 1.5
    prompts = torch.tensor([[5, 7]]).expand(count, 2)
    drawn = sample_rollout(policy, prompts, max_new_tokens=1, temperature=temperature, generator=seeded())
    with torch.no_grad():
        expected = count * (policy(prompts[:1])[0, -1].double() / temperature).softmax(0)
    seen = torch.bincount(drawn.tokens[:, -1], minlength=VOCABULARY).double()
    assert expected.min() > 5
    statistic = float(((seen - expected).square() / expected).sum())
    assert statistic < len(seen) - 1 + 4 * math.sqrt(2 * (len(seen) - 1))


def test_estimators_meet_the_exact_divergence(policy):
    """Means of k1 and k3 over 10,000 tokens that the server drew are KL(server ‖ trainer) within four errors."""
    trainer = Llama(policy.config)
    trainer.load_state_dict(policy.state_dict())
    with torch.no_grad():
        trainer.lm_head.weight.mul_(0.8)
    prompts = torch.tensor([[5, 7]]).expand(10_000, 2)
    drawn = sample_rollout(policy, prompts, max_new_tokens=1, generator=seeded())
    own = log_probs(trainer, drawn.tokens)
    found = mismatch(own, drawn.log_probs, drawn.mask)
    with torch.no_grad():
        exact = float(divergences(policy(prompts[:1])[0, -1:], trainer(prompts[:1])[0, -1:]))
    error_of_k1 = float((own - drawn.log_probs)[drawn.mask].std()) / 100
    assert found.k3.estimate == pytest.approx(exact, abs=4 * found.k3.error)
    assert found.k1 == pytest.approx(exact, abs=4 * error_of_k1)
    assert exact > 10 * found.k3.error


def test_a_text_ends_after_its_stop_token(policy):
    prompts = torch.tensor([[1, 2]]).expand(64, 2)
    drawn = sample_rollout(policy, prompts, max_new_tokens=20, stop_id=3, generator=seeded())
    for tokens, mask, values in zip(drawn.tokens[:, 1:], drawn.mask, drawn.log_probs, strict=True):
        stops = (tokens[1:] == 3).nonzero()
        end = int(stops[0]) + 1 if len(stops) else len(tokens) - 1
        assert mask.tolist() == [False] + [True] * end + [False] * (len(tokens) - 1 - end)
        assert tokens[1 + end :].eq(3).all()
        assert not values[~mask].any()
        assert values[mask].lt(0).all()
    assert drawn.tokens.shape[1] <= 22
    assert not drawn.mask.all()


def test_mismatch_by_numpy():
    random = np.random.default_rng(0)
    server = -random.exponential(size=(5, 40))
    trainer = np.minimum(server + 0.2 * random.standard_normal((5, 40)), 0)
    mask = random.random((5, 40)) < 0.7
    trainer[0, np.flatnonzero(mask[0])[0]] = np.nan
    server[1, np.flatnonzero(mask[1])[0]] = np.nan
    counted = mask & np.isfinite(trainer) & np.isfinite(server)
    log_ratio = (trainer - server)[counted]
    ratio = np.exp(log_ratio)
    k3 = [np.mean(np.exp(t[c] - s[c]) - 1 - (t[c] - s[c])) for t, s, c in zip(trainer, server, counted, strict=True)]
    found = mismatch(*(torch.from_numpy(each) for each in (trainer, server, mask)))
    assert (found.tokens, found.missing) == (counted.sum(), 2)
    assert found.mean == pytest.approx(np.abs(log_ratio).mean())
    assert found.p99 == pytest.approx(np.quantile(np.abs(log_ratio), 0.99))
    assert found.largest == pytest.approx(np.abs(log_ratio).max())
    k1 = [np.mean((s - t)[c]) for t, s, c in zip(trainer, server, counted, strict=True)]
    assert found.k1 == pytest.approx(np.mean(k1))
    assert found.k3.estimate == pytest.approx(np.mean(k3))
    assert found.k3.error == pytest.approx(np.std(k3, ddof=1) / math.sqrt(5))
    assert found.clipped == pytest.approx(np.mean(np.abs(ratio - 1) > 0.2))
    assert found.effective_share == pytest.approx(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()))
    assert found.as_metrics()["mismatch/k3"] == found.k3.estimate


def test_tokens_that_the_trainer_rules_out_are_an_infinite_mismatch():
    server = torch.full((4, 100), -1.0)
    trainer = server.clone()
    trainer[:, 1:] = -torch.inf
    monitor = MismatchMonitor(max_kl=0.01)
    with pytest.warns(UserWarning, match=r"update 1: KL .* is inf nats"):
        found = monitor.update(trainer, server)
    assert (found.tokens, found.missing) == (400, 0)
    assert found.mean == found.p99 == found.largest == found.k1 == found.k3.estimate == math.inf
    assert found.clipped == pytest.approx(0.99)
    assert found.effective_share == pytest.approx(0.01)
    assert found.as_metrics()["mismatch/k3"] == math.inf
    nothing = mismatch(torch.full_like(server, -torch.inf), server)
    assert (nothing.effective_share, nothing.p99) == (0.0, math.inf)


def test_missing_tokens_are_logged_and_warned_of_once():
    server = torch.full((4, 100), -1.0)
    trainer = server.clone()
    trainer[:, 1:] = torch.nan
    monitor = MismatchMonitor(max_kl=0.01)
    with pytest.warns(UserWarning, match=r"update 1: 396 of 400 drawn tokens have no log-probability"):
        found = monitor.update(trainer, server)
    assert found.as_metrics()["mismatch/missing"] == found.missing == 396
    monitor.update(trainer, server)  # a warning would be an error here
    MismatchMonitor().update(trainer, server)


def test_the_effective_share_of_a_ratio_beyond_float64():
    far = torch.tensor([[-1.0, -1.0]], dtype=torch.float64)
    assert mismatch(far, far - torch.tensor([[0.0, 2000.0]])).effective_share == pytest.approx(0.5)


def test_a_monitor_warns_once():
    near, far = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.5]])
    monitor = MismatchMonitor(max_kl=0.01)
    monitor.update(near, near)
    with pytest.warns(UserWarning, match=r"update 2: KL .* above 0.01; octavo agree"):
        monitor.update(near, far)
    monitor.update(near, far)  # a warning would be an error here
    assert [round(found.k3.estimate, 4) for found in monitor.history] == [0.0, 0.1487, 0.1487]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda policy: mismatch(torch.zeros(3), torch.zeros(3)), "one shape"),
        (lambda policy: mismatch(torch.zeros(1, 3), torch.zeros(1, 2)), "one shape"),
        (lambda policy: mismatch(*[torch.full((1, 3), torch.nan)] * 2), "no drawn token"),
        (lambda policy: mismatch(*[torch.zeros(1, 3)] * 3), "no drawn token"),
        (lambda policy: mismatch(cast(Any, [[-1.0]]), torch.zeros(1, 1)), "trainer.* torch.Tensor, not list"),
        (lambda policy: mismatch(torch.zeros(1, 1), cast(Any, [[-1.0]])), "server.* torch.Tensor, not list"),
        (
            lambda policy: mismatch(torch.zeros(1, 1), torch.zeros(1, 1), cast(Any, [[1]])),
            "mask must be a torch.Tensor, not list",
        ),
        (lambda policy: log_probs(policy, cast(Any, [[1, 2]])), "tokens must be a torch.Tensor, not list"),
        (lambda policy: log_probs(torch.nn.Linear(2, 2), torch.tensor([[1, 2]])), "a decoder .*, not a Linear"),
        (lambda policy: log_probs(policy, torch.tensor([[1, 2]]), temperature=1e-310), "1.9e-270 or more, not 1e-310"),
        (
            lambda policy: sample_rollout(policy, torch.tensor([[1, 2]]), max_new_tokens=1, temperature=1e-320),
            "1.9e-270 or more, not 1e-320",
        ),
        (lambda policy: MismatchMonitor(max_kl=0.0), "above 0"),
        (lambda policy: log_probs(policy, torch.tensor([[1]])), "at least 2"),
        (lambda policy: log_probs(policy, torch.tensor([[1, 2]]), temperature=0), "temperature"),
        (lambda policy: log_probs(policy, torch.tensor([[1, 2]]), profile="vllm"), "no engine"),
        (lambda policy: log_probs(policy, torch.tensor([[1, 2]]), profile="modelopt"), "give calibration="),
        (lambda policy: log_probs(policy, torch.tensor([[1, VOCABULARY]])), "ids of this model are 0 to 23"),
        (lambda policy: log_probs(policy, torch.tensor([[1.0, 2.0]])), "tokens are ids in int64, not float32"),
        (lambda policy: log_probs(policy, torch.tensor([[1, 2]]), profile=cast(Any, 3)), "a profile or its name"),
        (lambda policy: sample_rollout(policy, torch.zeros(0, 2, dtype=torch.long), max_new_tokens=1), "at least 1"),
        (lambda policy: sample_rollout(policy, torch.tensor([[1]]), max_new_tokens=0), "max_new_tokens"),
    ],
)
def test_wrong_arguments(policy, call, message):
    with pytest.raises(ConfigError, match=message):
        call(policy)


def test_a_trainer_s_own_forward_is_not_copied(policy):
    """What accelerate and TRL set on a model calls that model, so a copy must not keep it."""
    tokens = torch.arange(8).reshape(1, 8)
    expected = log_probs(policy, tokens, profile="vllm-token")
    original = policy.forward
    policy.forward = lambda *arguments: original(*arguments)
    try:
        assert torch.equal(log_probs(policy, tokens, profile="vllm-token"), expected)
    finally:
        del policy.forward


def test_the_smallest_temperature_draws_the_likeliest_token(policy):
    prompts = torch.tensor([[1, 2], [3, 4]])
    drawn = sample_rollout(policy, prompts, max_new_tokens=2, temperature=2e-270, generator=seeded())
    assert torch.equal(drawn.log_probs[drawn.mask], torch.zeros(4, dtype=torch.float64))
    with torch.no_grad():
        assert torch.equal(policy(prompts)[:, -1].argmax(1), drawn.tokens[:, 2])


@pytest.mark.parametrize("side", ["trainer", "server"])
@pytest.mark.parametrize("value", [torch.inf, 2.3])
def test_numbers_above_0_are_no_log_probabilities(side, value):
    both = {name: torch.full((2, 3), -1.0) for name in ("trainer", "server")}
    both[side][1, 2] = value
    with pytest.raises(ConfigError, match=f"the {side} has {value} for a drawn token; log-probabilities are at most 0"):
        mismatch(**both)
    mask = torch.ones(2, 3)
    mask[1, 2] = 0
    assert mismatch(**both, mask=mask).tokens == 5


def test_log_probabilities_that_rounding_moves_above_0_count():
    rounded = torch.tensor([[-1.0, 0.125]])  # 33 - 32.9 in BF16
    assert mismatch(rounded, rounded).tokens == 2

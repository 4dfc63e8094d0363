"""What is sampled, beside transformers' own filters; and what may be asked for."""

import math
from collections import Counter
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError
from octavo.inference import SamplingParams
from octavo.inference.sampling import Sampler
from octavo.models import generation
from octavo.models.generation import probabilities, sample

LOGITS = torch.tensor([2.0, -1.0, 0.5, 1.9, 0.4, -3.0, 1.0, 0.0])


def kept_by_transformers(logits, *, temperature=1.0, top_k=None, top_p=1.0, min_p=0.0):
    from transformers import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    warpers: list[Any] = [TemperatureLogitsWarper(temperature)]
    warpers += [] if top_k is None else [TopKLogitsWarper(top_k)]
    warpers += [] if top_p == 1 else [TopPLogitsWarper(top_p)]
    warpers += [] if min_p == 0 else [MinPLogitsWarper(min_p)]
    scores = logits[None].clone()
    for warp in warpers:
        scores = warp(torch.zeros(1, 1, dtype=torch.long), scores)
    return scores[0].softmax(-1)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_p": 0.6},
        {"top_p": 0.01},
        {"min_p": 0.3},
        {"temperature": 2.0, "top_k": 5, "top_p": 0.8, "min_p": 0.35},
    ],
    ids=str,
)
def test_probabilities_match_transformers(settings):
    for seed in range(20):
        size = 50 if seed < 10 else 5000
        logits = LOGITS if seed == 0 else torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3
        kept = probabilities(logits, **{"temperature": 1.0, **settings})
        torch.testing.assert_close((kept / kept.sum()).float(), kept_by_transformers(logits, **settings))


def test_sample_frequencies_match_probabilities():
    wanted, chooser = LOGITS.softmax(0), Sampler(SamplingParams(seed=1))
    drawn = Counter(chooser.choose(LOGITS).token for _ in range(1000))
    for token, probability in enumerate(wanted.tolist()):
        assert abs(drawn[token] / 1000 - probability) <= 4 * math.sqrt(probability * (1 - probability) / 1000)


def test_excluded_tokens_are_never_sampled():
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    asked: dict[str, Any] = {"temperature": 5.0, "top_k": 40, "top_p": 0.5}
    kept = {*probabilities(logits, **asked).nonzero()[:, 0].tolist()}
    chooser = Sampler(SamplingParams(seed=1, **asked))
    assert {chooser.choose(logits).token for _ in range(2000)} == kept
    assert len(kept) < 40


def test_largest_draw_selects_an_included_token(monkeypatch):
    """Half an ulp below a total of this size is the total again."""
    monkeypatch.setattr(
        generation, "probabilities", lambda *_, **__: torch.tensor([0.5 + 2**-52, 0.0], dtype=torch.float64)
    )
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(1 - 2**-53, dtype=torch.float64))
    assert sample(LOGITS, temperature=1.0) == 0


def test_seed_is_reproducible_and_global_generator_unchanged():
    state = torch.get_rng_state()
    first, second, other = (Sampler(SamplingParams(seed=seed)) for seed in (5, 5, 6))
    tokens = [[chooser.choose(LOGITS).token for _ in range(50)] for chooser in (first, second, other)]
    assert tokens[0] == tokens[1] != tokens[2]
    Sampler(SamplingParams()).choose(LOGITS)
    assert torch.equal(torch.get_rng_state(), state)


def test_logprobs_do_not_depend_on_temperature():
    chosen = Sampler(SamplingParams(temperature=0, logprobs=3)).choose(LOGITS)
    wanted = LOGITS.log_softmax(0)
    assert chosen.token == 0
    assert chosen.logprob == pytest.approx(float(wanted[0]), rel=1e-6)
    assert [token for token, _ in chosen.top] == [0, 3, 6]
    assert [number for _, number in chosen.top] == pytest.approx(wanted[[0, 3, 6]].tolist(), rel=1e-6)
    assert Sampler(SamplingParams(temperature=0, logprobs=0)).choose(LOGITS).top == ()
    assert Sampler(SamplingParams(temperature=0)).choose(LOGITS).logprob is None


def test_small_top_p_keeps_one_of_equal_tokens():
    assert {sample(torch.zeros(9), temperature=1.0, top_p=1e-9) for _ in range(20)} == {0}


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1"),
        ({"temperature": -1.0}, "temperature must be 0 or more"),
        ({"temperature": math.nan}, "temperature must be 0 or more"),
        ({"top_k": 0}, "top_k must be a whole number"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.1}, "top_p must be above 0"),
        ({"min_p": -0.1}, "min_p must be from 0 to 1"),
        ({"seed": -1}, "seed must be a whole number"),
        ({"seed": 2**63}, "seed may be"),
        ({"stop": ("",)}, "stop texts must not be empty"),
        ({"logprobs": 21}, "logprobs may be at most 20"),
        ({"prompt_logprobs": True}, "give logprobs"),
        ({"deadline_s": 0.0}, "deadline_s must be a positive number"),
        ({"deadline_s": math.nan}, "deadline_s must be a positive number"),
    ],
    ids=str,
)
def test_invalid_params_raise(setting, says):
    with pytest.raises(ConfigError, match=says):
        SamplingParams(**setting)

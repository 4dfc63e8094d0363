"""Sampling, with models whose logits are written down."""

import math
from contextlib import contextmanager

import pytest
import torch

from octavo.errors import ConfigError
from octavo.models import FullPass, generate
from octavo.models.generation import sample


class Table(torch.nn.Module):
    """Logits depend on the last token alone: a row of a table."""

    def __init__(self, rows):
        super().__init__()
        self.rows = torch.nn.Parameter(torch.tensor(rows))
        self.lengths = []

    def forward(self, tokens):
        self.lengths.append(tokens.shape[1])
        return self.rows[tokens]


# After 0 comes 1, after 1 comes 2, after 2 comes 0.
CYCLE = [[0.0, 9.0, 1.0], [0.0, 1.0, 9.0], [9.0, 0.0, 1.0]]


def test_temperature_zero_takes_the_likeliest():
    assert list(generate(Table(CYCLE), [0], max_new_tokens=5, temperature=0, context=8)) == [1, 2, 0, 1, 2]


def test_model_reads_at_most_context_tokens():
    model = Table(CYCLE)
    list(generate(model, [0, 1, 2, 0], max_new_tokens=3, temperature=0, context=5))
    assert model.lengths == [4, 5, 5]
    list(generate(model, [0, 1, 2, 0], max_new_tokens=3, temperature=0))
    assert model.lengths[3:] == [4, 5, 6]


def test_ends_before_the_stop_token():
    assert list(generate(Table(CYCLE), [0], max_new_tokens=9, temperature=0, context=8, stop_id=0)) == [1, 2]


def test_frequencies_follow_the_softmax():
    logits = torch.tensor([0.0, 1.0, 2.0])
    generator = torch.Generator().manual_seed(0)
    draws = torch.tensor([sample(logits, temperature=0.5, generator=generator) for _ in range(4000)])
    expected = torch.softmax(logits / 0.5, 0)
    torch.testing.assert_close(torch.bincount(draws, minlength=3) / 4000, expected, atol=0.02, rtol=0)


def test_top_k_excludes_all_other_tokens():
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([5.0, 0.0, 4.9, 4.8])
    draws = {sample(logits, temperature=5.0, top_k=2, generator=generator) for _ in range(200)}
    assert draws == {0, 2}


def test_same_generator_gives_the_same_text():
    def text(seed):
        generator = torch.Generator().manual_seed(seed)
        return list(generate(Table(CYCLE), [0], max_new_tokens=30, temperature=8.0, generator=generator, context=4))

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_training_mode_is_restored():
    model = Table(CYCLE).train()
    modes = []
    model.register_forward_hook(lambda module, *_: modes.append(module.training))
    for _ in generate(model, [0], max_new_tokens=2, context=4):
        assert model.training
    assert modes == [False, False]


def test_context_manager_surrounds_every_pass_and_only_it():
    inside = []

    @contextmanager
    def within():
        inside.append(True)
        yield
        inside.append(False)

    class Again:
        """A context that can be entered any number of times."""

        def __enter__(self):
            self.entered = within()
            self.entered.__enter__()

        def __exit__(self, *error):
            self.entered.__exit__(*error)

    tokens = generate(FullPass(Table(CYCLE), within=Again()), [0], max_new_tokens=2, temperature=0)
    assert inside == []
    assert list(tokens) == [1, 2]
    assert inside == [True, False, True, False]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt_ids": []}, "prompt is empty"),
        ({"temperature": -0.1}, "temperature must be 0 or more, not -0.1"),
        ({"temperature": float("nan")}, "temperature must be 0 or more"),
        ({"top_k": 1.5}, "top_k must be a whole number of at least 1, not 1.5"),
        ({"top_k": 0}, "top_k must be a whole number of at least 1, not 0"),
        ({"context": 0}, "context must be a whole number of at least 1, not 0"),
        ({"max_new_tokens": -1}, "max_new_tokens must be a whole number of at least 0, not -1"),
    ],
)
def test_refuses(changes, words):
    arguments = {"prompt_ids": [0], "max_new_tokens": 1, "temperature": 1.0, "context": 4, **changes}
    with pytest.raises(ConfigError, match=words):
        generate(Table(CYCLE), arguments.pop("prompt_ids"), **arguments)


@pytest.mark.parametrize("prompt", [torch.tensor([1, 2]), "12", 5])
def test_prompt_of_another_type_is_refused(prompt):
    with pytest.raises(TypeError, match=f"a list of token ids, not {type(prompt).__name__}"):
        generate(Table(CYCLE), prompt, max_new_tokens=1, context=4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("logits", [[1.0, math.nan, 2.0], [math.inf, 1.0], [-math.inf, -math.inf]])
def test_nonfinite_logits_are_refused(temperature, logits):
    with pytest.raises(ConfigError, match="no token can be sampled; check for NaN"):
        sample(torch.tensor(logits), temperature=temperature)


def test_excluded_token_is_never_sampled():
    assert sample(torch.tensor([-math.inf, 1.0]), temperature=1.0) == 1


@pytest.mark.parametrize("temperature", [1e-40, 1e-300])
def test_a_tiny_temperature_takes_the_likeliest(temperature):
    assert sample(torch.tensor([0.0, 9.0, 1.0]), temperature=temperature, top_k=2) == 1

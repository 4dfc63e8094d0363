"""Paired runs: equal but for the precision of some layers, and a run that breaks is counted."""

import math
from contextlib import contextmanager

import numpy as np
import pytest

from octavo.experiments import Origin, paired, short_run
from octavo.experiments.paired import Effect, PairedRuns, fp8_layers, pooled_error
from octavo.recipes import names
from octavo.training.setup import build_model
from tests.unit.training.tiny_runs import tiny_config, tiny_data

BLOCK = "model.layers.0"


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    return Origin(config=tiny_config(recipe="tensorwise"), data=tiny_data(tmp_path_factory.mktemp("data")))


def test_all_layers_in_bf16_are_a_bf16_run(origin):
    """To the last digit: what surrounds the layers is the same in both."""
    runs = PairedRuns(origin, steps=4, orders=2)
    assert "bf16" in names()
    for order, loss in enumerate(runs.losses(runs.layers)):
        plain, _ = short_run(origin.config.with_training(recipe="bf16", seed=order), origin.data, steps=4)
        assert loss == sum(value for _, value in plain.losses[2:]) / 2


def test_no_layer_in_bf16_is_the_run_itself_and_runs_are_made_once(origin):
    runs = PairedRuns(origin, steps=4, orders=2)
    first = runs.losses(())
    plain, _ = short_run(origin.config, origin.data, steps=4)
    assert first[0] == sum(value for _, value in plain.losses[2:]) / 2
    assert runs.losses(()) == first
    assert runs.made == 2


def test_a_run_that_breaks_counts_as_one_that_predicts_nothing(origin):
    @contextmanager
    def fault(trainer):
        trainer.model.lm_head.weight.data.fill_(math.nan)
        yield

    runs = PairedRuns(origin, steps=2, orders=2, around=fault)
    assert runs.losses(()) == (math.log(origin.data.vocab_size),) * 2


def test_a_layer_with_an_override_of_its_own_is_in_bf16_too(origin, monkeypatch):
    """A remedy's override names a layer, and the first pattern that matches counts."""
    mended = f"{BLOCK}.mlp.down_proj"
    config = origin.config.with_training(overrides={mended: "mxfp8", "*.q_proj": "rowwise"})
    ran = []

    def run(config, data, **_):
        ran.append(fp8_layers(build_model(config, data.vocab_size)[0]))
        return short_run(config, data, steps=2)

    monkeypatch.setattr(paired, "short_run", run)
    runs = PairedRuns(Origin(config=config, data=origin.data), steps=2, orders=2)
    assert mended in runs.layers
    runs.losses(runs.layers)
    assert ran == [(), ()]


def test_an_effects_error_is_that_of_a_mean(origin, monkeypatch):
    losses = {False: (2.0, 2.1, 2.4, 2.1), True: (1.9, 2.1, 2.0, 2.0)}
    monkeypatch.setattr(PairedRuns, "_loss", lambda _, high, order: losses[bool(high)][order])
    effect = PairedRuns(origin, steps=2, orders=4).effect((), (f"{BLOCK}.mlp.down_proj",))
    assert effect.nats == pytest.approx(0.15)
    assert effect.error == pytest.approx(np.std([0.1, 0.0, 0.4, 0.1], ddof=1) / 2)


def test_errors_are_pooled():
    effects = [Effect(nats=1.0, error=3.0, orders=()), Effect(nats=1.0, error=4.0, orders=())]
    assert pooled_error(effects) == pytest.approx(math.sqrt(12.5))
    assert pooled_error(effects[:1]) == 3.0

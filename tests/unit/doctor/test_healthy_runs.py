"""Real runs with nothing wrong: every recipe, every step looked at, no finding above a note."""

import dataclasses

import pytest

from octavo.doctor import Severity, diagnose
from octavo.experiments import short_run
from octavo.training.config import Precision
from octavo.training.recipe_choice import PLAIN_RECIPES, trainable_recipes
from tests.unit.training.tiny_runs import tiny_config

RECIPES = [name for name in trainable_recipes() if name not in PLAIN_RECIPES]
STEPS = 18


def alarming(config, data):
    run, _ = short_run(config, data, steps=STEPS)
    assert run.failure is None
    assert len(run.series.casts.steps) == STEPS
    return [one for one in diagnose(run.series) if one.severity is not Severity.NOTE]


def watched(recipe, **training):
    return tiny_config(recipe=recipe, steps=STEPS, statistics_interval=1, lr=1e-3, **training)


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
def test_healthy_run_raises_no_alarm(recipe, data):
    assert alarming(watched(recipe), data) == []


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1, "precision": Precision.FP32},
        {"seed": 2, "precision": Precision.FP16},
        {"seed": 3, "grad_accumulation": 2},
        {"seed": 4, "recipe_options": {"history_length": 4, "margin": 1, "update_interval": 2}},
        {"seed": 5, "recipe_options": {"statistic": "latest", "history_length": 1}},
    ],
)
def test_delayed_scaling_in_other_precisions_raises_no_alarm(changes, data):
    assert alarming(watched("delayed", **changes), data) == []


@pytest.mark.long
def test_run_at_three_times_the_learning_rate_raises_no_alarm(data):
    config = watched("tensorwise", seed=6)
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, lr=3e-3))
    assert alarming(config, data) == []

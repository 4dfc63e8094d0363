"""Loops of one's own with a fault that is none of FP8's, and healthy ones at several rates and schedules."""

import math

import pytest
import torch

import octavo
from octavo.doctor import Severity, watch

STEPS = 100


def trained(
    recipe="delayed",
    *,
    steps=STEPS,
    interval=10,
    lr=5e-3,
    schedule=lambda step, steps: 1.0,
    optimizer="AdamW",
    damage=None,
):
    """A watcher of a small classifier that learns what another network answers.

    Args:
        recipe: of its layers.
        steps: updates.
        interval: of the samples.
        lr: learning rate, which ``schedule`` multiplies.
        schedule: factor at a step, counted from 1.
        optimizer: name in torch.optim.
        damage: step before which the second layer's weight is multiplied by 100.
    """
    torch.manual_seed(0)
    teacher = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))
    layers = [
        torch.nn.Linear(32, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 10),
    ]
    model = torch.nn.Sequential(*layers)
    octavo.convert(model, recipe)
    updates = getattr(torch.optim, optimizer)(model.parameters(), lr=lr)
    watcher = watch(model, updates, interval=interval)
    for step in range(1, steps + 1):
        updates.param_groups[0]["lr"] = lr * schedule(step, steps)
        if step == damage:
            with torch.no_grad():
                model.get_parameter("2.weight").mul_(100)
        with watcher.step() as notes:
            x = torch.randn(64, 32)
            notes.loss = torch.nn.functional.cross_entropy(model(x), (3 * teacher(x)).argmax(1))
            notes.loss.backward()
            updates.step()
            updates.zero_grad()
    return watcher


def jump(step, steps):
    return 50.0 if step >= 60 else 1.0


@pytest.mark.long
@pytest.mark.parametrize("lr", [5e-3, 1e-3])  # at the second the loss comes back, and falls further than before
@pytest.mark.parametrize(("steps", "interval"), [(78, 10), (100, 1), (100, 10), (200, 10)])
def test_a_rate_that_jumps_is_the_first_finding_however_long_the_run(steps, interval, lr):
    findings = trained(steps=steps, interval=interval, lr=lr, schedule=jump).findings()
    assert (findings[0].code, findings[0].first_step) == ("learning-rate", 60)
    assert findings[0].remedies[0].changes == {"lr": pytest.approx(lr)}
    assert not {one.code for one in findings} & {"divergence", "loss-spike", "stale-scale", "gradient-underflow"}


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize(("interval", "steps"), [(1, (65, 65)), (10, (61, 70))])
def test_a_weight_that_is_damaged_is_the_first_finding(interval, steps, optimizer):
    lr = 5e-3 if optimizer == "AdamW" else 0.05
    findings = trained(interval=interval, lr=lr, optimizer=optimizer, damage=65).findings()
    assert (findings[0].code, findings[0].path, findings[0].severity) == ("weight-jump", "2", Severity.FAIL)
    assert (findings[0].first_step, findings[0].last_step) == steps
    assert "octavo train --from" in findings[0].remedies[0].text
    assert not {one.code for one in findings} & {"divergence", "loss-spike", "stale-scale", "gradient-underflow"}


def cosine(step, steps):
    """Warm-up over a fifth, then a cosine to a hundredth."""
    return min(1.0, 5 * step / steps) * (0.01 + 0.99 * (1 + math.cos(math.pi * step / steps)) / 2)


def restarting(step, steps):
    """A cosine to a fiftieth that restarts twice."""
    return 0.02 + 0.98 * (1 + math.cos(math.pi * (step % (steps // 3)) / (steps // 3))) / 2


@pytest.mark.parametrize("schedule", [cosine, restarting, lambda step, steps: 1.0])
@pytest.mark.parametrize("lr", [1e-3, 5e-3, 1e-2])
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_warm_up_cosine_and_restarts_are_healthy(recipe, lr, schedule):
    findings = trained(recipe, lr=lr, schedule=schedule, steps=90).findings()
    assert [one for one in findings if one.severity is not Severity.NOTE] == []

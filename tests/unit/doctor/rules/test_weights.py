"""Codes of another tensor, and weights that jump, on both sides of the thresholds."""

from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest
import torch

import octavo
from octavo.doctor import Severity, Thresholds, diagnose, series_of, watch
from octavo.doctor.rules.weights import stale_weight, weight_jump
from octavo.functional import WeightCache
from tests.unit.doctor.synthetic_series import FIRST, SECOND, looks, steps

LIMITS = Thresholds()


@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
@pytest.mark.parametrize(("mismatch", "found"), [(0.0011, 1), (0.001, 0)])
def test_stale_weight_needs_only_one_sample(role, mismatch, found):
    series = looks(casts={(FIRST, role): {"code_mismatch": [0, 0, mismatch, 0, 0, 0]}})
    result = list(stale_weight(series, LIMITS))
    assert [(one.path, one.role, one.severity) for one in result] == [(FIRST, role, Severity.FAIL)] * found


def test_stale_weight_reports_its_steps_and_mismatch():
    series = looks(casts={(FIRST, "weight"): {"code_mismatch": [0, 0.02, 0.05, 0.04, 0, 0], "cosine": 0.998}})
    (found,) = stale_weight(series, LIMITS)
    assert (found.first_step, found.last_step) == (10, 20)
    assert found.cause.startswith("5.00% of the codes that the output GEMM multiplies are not those of the weight")
    assert found.evidence == {"code_mismatch": 0.05, "cosine": 0.998, "samples": 3}


def test_a_weight_that_moves_under_its_cached_codes():
    """The real thing: a cache that does not notice an update."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False))
    octavo.convert(model, "tensorwise", cache_weights=True)
    cache = model[0].weight_cache
    assert isinstance(cache, WeightCache)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    watcher, x = watch(model, optimizer, interval=1), torch.randn(8, 64)
    with ExitStack() as stack:
        for _ in range(3):
            with watcher.step():
                model(x).square().sum().backward()
                optimizer.step()
            kept = cache._operands
            stack.enter_context(mock.patch.object(cache, "operands", lambda *_, k=kept, **__: k))
    found = list(stale_weight(series_of([], list(watcher.samples)), LIMITS))
    assert [(one.code, one.role, one.first_step) for one in found] == [("stale-weight", "weight", 2)]


def jumping(amaxes, *, update=1e-3, rms=0.1, recipe="rowwise", interval=5, lr=None, role="weight"):
    """Six samples of which the second layer's weight has these amaxes; updates are ``update`` of an rms of ``rms``."""
    lines = [] if lr is None else steps([3.0] * 30, lr=lr)
    casts = {(SECOND, role): {"amax": amaxes, "rms": rms}, (FIRST, role): {"amax": 0.3, "rms": rms}}
    return looks(recipe, interval=interval, updates=update, casts=casts, lines=lines)


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({"amaxes": [0.3, 0.3, 0.3, 1.21, 1.2, 1.2]}, 1),  # fourfold
        ({"amaxes": [0.3, 0.3, 0.3, 1.19, 1.2, 1.2]}, 0),
        ({"amaxes": [0.3, 0.3, 0.3, 0.074, 0.07, 0.07]}, 1),  # to a quarter
        ({"amaxes": [0.3, 0.3, 0.3, 0.076, 0.07, 0.07]}, 0),
        ({"amaxes": [0.3, 0.3, 0.3, 30, 30, 30], "update": 1.8}, 1),  # 32 times the rms of 5 updates of 0.18 is 28.8
        ({"amaxes": [0.3, 0.3, 0.3, 30, 30, 30], "update": 1.9}, 0),
        ({"amaxes": [0.3, 0.3, 0.3, 30, 30, 30], "update": [0.01] * 3 + [2.5] * 3}, 0),  # such as a rate that jumped
        ({"amaxes": [0.3, 0.3, 0.3, 30, 30, 30], "update": [0.01] * 3 + [9.0] * 3, "interval": 1}, 1),  # later than it
        ({"amaxes": [0.3, 0.3, 0.3, 30, 30, 30], "update": 0.1, "lr": [1e-3] * 16 + [0.1] * 14}, 0),
        ({"amaxes": [0.3, 0.3, 0.3, 30, 30, 30], "update": 0.1, "lr": 1e-3}, 1),
        ({"amaxes": [0.0, 0.0, 0.3, 0.3, 0.3, 0.3]}, 0),  # an adapter's second matrix, which begins at zero
        ({"amaxes": [0.3, 0.3, 0.3, 30, 30, 30], "update": float("nan")}, 0),
        ({"amaxes": [0.3, 0.3, 0.3, 30, 30, 30], "role": "input"}, 0),
    ],
)
def test_a_weight_that_jumps_beyond_its_updates(changes, count):
    assert [(one.path, one.severity) for one in weight_jump(jumping(**changes), LIMITS)] == [
        (SECOND, Severity.FAIL)
    ] * count


def test_a_jump_reports_the_steps_between_its_samples():
    (found,) = diagnose(jumping([0.3, 0.3, 0.3, 30, 30, 30]))
    assert (found.code, found.role, found.first_step, found.last_step) == ("weight-jump", "weight", 16, 20)
    assert found.cause == (
        "the weight's amax is multiplied by 100 between steps 15 and 20; updates can change it by 0.016 at most, so "
        "something else wrote to it, such as a damaged checkpoint"
    )
    assert found.remedies[0].text.startswith("Start again from a checkpoint of step 15 or earlier")
    assert found.remedies[0].changes == {}


def test_a_weight_that_no_optimizer_is_known_for_does_not_jump():
    series = jumping([0.3, 0.3, 0.3, 30, 30, 30])
    table = series.parameters
    unknown = replace(table, keys=tuple(f"other.{name}" for name in table.keys))
    assert not list(weight_jump(replace(series, parameters=unknown), LIMITS))

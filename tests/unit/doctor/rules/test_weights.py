"""Codes of another tensor, on both sides of the thresholds."""

from contextlib import ExitStack
from unittest import mock

import pytest
import torch

import octavo
from octavo.doctor import Severity, Thresholds, series_of, watch
from octavo.doctor.rules.weights import stale_weight
from octavo.functional import WeightCache
from tests.unit.doctor.synthetic_series import FIRST, looks

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

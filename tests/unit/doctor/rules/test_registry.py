"""The rules together: none is left out, none fails on a series without what it looks at."""

import importlib
import pkgutil

import pytest

from octavo.doctor import Thresholds, rules, series_of
from octavo.doctor.findings import CAUSES
from octavo.doctor.rules import RULES
from tests.unit.doctor.synthetic_series import looks, steps

ELSEWHERE = {"loss_gap", "slow_layers"}  # of two series; without a run
OF_PREFLIGHT = {"nondeterministic", "checkpoint", "memory"}


def public_rules():
    for module in pkgutil.iter_modules(rules.__path__, f"{rules.__name__}."):
        if not module.name.endswith((".registry", ".tracks")):
            yield from (
                (name, getattr(importlib.import_module(module.name), name))
                for name in importlib.import_module(module.name).__all__
            )


def test_every_rule_is_registered():
    found = dict(public_rules())
    assert {found[name] for name in found.keys() - ELSEWHERE} == set(RULES)
    assert len(RULES) == len(set(RULES))


def test_every_finding_has_a_rule_of_its_name():
    names = {name.replace("_", "-") for name, _ in public_rules()}
    assert names - {"slow-layers"} == set(CAUSES) - OF_PREFLIGHT


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_reports_anything_for_an_empty_or_minimal_run(rule):
    for series in (
        series_of([]),
        series_of(steps([3.0, 2.9])),
        looks(count=1),
        series_of([{"kind": "autopilot", "step": 3}]),
    ):
        assert not list(rule(series, Thresholds()))

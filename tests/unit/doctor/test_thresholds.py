"""Every threshold has a source and a rule."""

import inspect
import math
from dataclasses import fields

import pytest

from octavo.doctor import Thresholds
from octavo.doctor.rules import gap, modules, nonfinite, outliers, range, scales, steps, sums, weights  # noqa: A004
from octavo.doctor.thresholds import source_of
from octavo.errors import ConfigError

NAMES = [one.name for one in fields(Thresholds)]
RULES = "".join(inspect.getsource(m) for m in (gap, modules, nonfinite, outliers, range, scales, steps, sums, weights))


@pytest.mark.parametrize("name", NAMES)
def test_has_a_source_and_is_used(name):
    source = source_of(name)
    assert source.kind in ("published", "ours")
    assert len(source.why) > 20
    assert f"limits.{name}" in RULES


def test_what_is_published_names_its_source():
    published = {name: source_of(name).why for name in NAMES if source_of(name).kind == "published"}
    assert set(published) == {"saturation_fraction", "gradient_to_noise", "slow_weight_elements", "loss_gap"}
    assert all("arXiv" in why or "torchao" in why for why in published.values())


@pytest.mark.parametrize("value", [math.nan, math.inf, True, "1"])
def test_a_threshold_is_a_finite_number(value):
    with pytest.raises(ConfigError, match="threshold stale_ratio must be a finite number"):
        Thresholds(stale_ratio=value)


def test_warn_comes_before_fail():
    limits = Thresholds()
    pairs = [name.removesuffix("_fail") for name in NAMES if name.endswith("_fail")]
    assert all(getattr(limits, name) <= getattr(limits, f"{name}_fail") for name in pairs if name != "persistent_looks")

"""Every threshold has a source and a rule."""

import math
import re
from dataclasses import fields
from pathlib import Path

import pytest

from octavo import doctor
from octavo.doctor import Thresholds
from octavo.doctor.thresholds import source_of
from octavo.errors import ConfigError

NAMES = [one.name for one in fields(Thresholds)]
SOURCE = Path(doctor.__path__[0]).parent
RULES = "".join(
    file.read_text(encoding="utf-8")
    for pattern in ("doctor/rules/*.py", "doctor/losses.py", "experiments/preflight/*.py")
    for file in SOURCE.glob(pattern)
)


@pytest.mark.parametrize("name", NAMES)
def test_has_a_source_and_is_used(name):
    source = source_of(name)
    assert source.kind in ("published", "ours")
    assert len(source.why) > 20
    assert re.search(rf"\b(limits|thresholds)\.{name}\b", RULES)


def test_published_thresholds_cite_their_source():
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

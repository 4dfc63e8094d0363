"""Runs that were looked at, and rules that find what a test says."""

import importlib
from collections.abc import Callable

import pytest

from octavo.doctor import Finding, Severity


@pytest.fixture
def finding_what(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the doctor find these, whatever the statistics are."""

    def install(*findings: Finding) -> None:
        module = importlib.import_module("octavo.doctor.diagnose")  # the package's name is the function
        monkeypatch.setattr(module, "RULES", (lambda _series, _thresholds: iter(findings),))

    return install


@pytest.fixture
def saturation() -> Finding:
    return Finding(
        code="saturation",
        severity=Severity.FAIL,
        path="model.layers.0.mlp.up_proj",
        role="grad_output",
        first_step=1,
        last_step=4,
        evidence={"saturation_fraction": 0.21},
        cause="values exceed the range of the scale",
        weight=0.21,
    )

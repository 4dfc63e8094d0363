"""docs/doctor.md says what the code does."""

from dataclasses import fields
from pathlib import Path

import pytest

from octavo.doctor import Thresholds
from octavo.doctor.findings import CAUSES
from octavo.doctor.thresholds import source_of

PAGE = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [one.name for one in fields(Thresholds)])
def test_every_threshold_is_listed_with_its_value_and_source(name):
    source = source_of(name)
    assert f"| `{name}` | {getattr(Thresholds(), name):g} | {source.kind} | {source.why} |" in PAGE


def test_every_finding_is_listed_and_no_other():
    section = PAGE.split("## Findings")[1].split("\n## ")[0]
    listed = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
    assert sorted(listed) == sorted(CAUSES)

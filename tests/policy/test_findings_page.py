"""The pages of findings, statistics and symptoms: every code, threshold and statistic appears, and no other."""

import re
from dataclasses import fields
from types import SimpleNamespace

import pytest

from octavo.doctor import Thresholds
from octavo.doctor.findings import CAUSES
from octavo.doctor.remedies.selection import FIXED_REMEDIES, REMEDY_RULES
from octavo.doctor.statistics import CAST_FIELDS, PRODUCT_FIELDS
from octavo.doctor.thresholds import source_of
from tests.policy.source_tree import ROOT

site_pages = pytest.importorskip("scripts.site_pages", reason="mkdocs is not installed")


@pytest.fixture(scope="module")
def findings_page():
    return site_pages.findings_page()


def test_every_finding_appears_once_and_no_other(findings_page):
    headings = [line.removeprefix("## ") for line in findings_page.splitlines() if line.startswith("## ")]
    assert headings == [*CAUSES, "Thresholds"]
    assert CAUSES.keys() == FIXED_REMEDIES.keys() | REMEDY_RULES.keys()


@pytest.mark.parametrize("code", CAUSES)
def test_finding_has_its_cause_its_rule_and_a_remedy(findings_page, code):
    section = findings_page.split(f"\n## {code}\n")[1].split("\n## ")[0]
    cause, rest = section.strip().split("\n\n", 1)
    assert cause.lower() == f"{CAUSES[code]}.".lower()
    assert not rest.startswith(("Shown by:", "Remedies:"))
    assert "\n- " in rest.split("Remedies:")[1]


@pytest.mark.parametrize("name", [one.name for one in fields(Thresholds)])
def test_every_threshold_is_listed_with_its_value_and_source(findings_page, name):
    source = source_of(name)
    assert f"| `{name}` | {getattr(Thresholds(), name):g} | {source.kind} | {source.why} |" in findings_page


def test_every_statistic_appears_with_the_formula_of_a_cast():
    rows = [line.split(" | ") for line in site_pages.statistics_page().splitlines() if line.startswith("| `")]
    cells = {row[0].strip("| `"): row for row in rows}
    assert {len(row) for row in rows} == {5}
    assert {f"casts.{name}" for name in CAST_FIELDS} | {f"products.{name}" for name in PRODUCT_FIELDS} <= cells.keys()
    assert all(row[3] for name, row in cells.items() if name.startswith("casts."))


def test_symptoms_are_shown_by_findings_that_exist():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    codes = {code for row in rows if len(row) == 4 for code in re.findall(r"`([a-z]+(?:-[a-z]+)*)`", row[1])}
    not_codes = {"message", "param"}  # of the server's answers
    assert codes - not_codes <= CAUSES.keys()
    assert len(codes) > 15


@pytest.mark.parametrize(
    ("page", "text", "link"),
    [
        ("troubleshooting.md", "[findings](../src/octavo/doctor/findings.py)", "[findings](reference/findings.md)"),
        ("concepts/x.md", "[them](../../src/octavo/doctor/statistics.py)", "[them](../reference/statistics.md)"),
        (
            "how-to/x.md",
            "[octavo.plot](../../src/octavo/plot/__init__.py)",
            "[octavo.plot](../reference/api/octavo.plot.md)",
        ),
        ("how-to/x.md", "[another](../../src/octavo/errors.py)", "another"),
    ],
)
def test_links_to_the_sources_of_generated_pages_lead_to_the_pages_on_the_site(page, text, link):
    """A checkout has no generated page; its readers get the source."""
    of_site = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    assert site_pages.on_page_markdown(text, page=of_site) == link

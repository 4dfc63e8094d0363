"""A report survives its JSON, and reports of one machine are joined."""

from dataclasses import replace

import pytest

from benchmarks.hopper.reading import joined, load_report
from octavo.bench.results import Failure, PartRecord, Report, Verdict
from octavo.errors import ConfigError
from tests.unit.bench.made_report import SECTION, made_report


@pytest.fixture
def report() -> Report:
    return made_report()


def test_a_report_survives_its_json(report, tmp_path):
    path = tmp_path / "r.json"
    path.write_text(report.to_json())
    assert load_report(path) == report


def part(name, *sections):
    failure = None if sections else Failure(name=name, reason="left out")
    return PartRecord(name=name, sections=list(sections), failure=failure)


def test_calls_are_joined_a_part_at_a_time(report):
    """The last that found anything stands for a part; what nobody found stays named."""
    later = replace(SECTION, title="later")
    one = replace(report, command="one", parts=[part("card", SECTION), part("casts", SECTION), part("layer")])
    two = replace(report, command="two", measured="2026-01-03", parts=[part("card", later), part("casts"), part("x")])
    both = joined([one, two])
    titles = {each.name: [section.title for section in each.sections] for each in both.parts}
    assert titles == {"card": ["later"], "casts": ["Casts"], "layer": [], "x": []}
    assert (both.command, both.measured) == ("one; two", "2026-01-03")
    assert joined([report]) == report


def test_a_bar_that_one_call_judged_counts_once_and_judged(report):
    """Where it stands in a table, and where its table was not come to; the last judgement counts."""
    bars = [Verdict(claim=claim, bar=0.5, reason="no time was left for it") for claim in "abcd"]
    a, b, c, d = bars
    one = part(
        "casts", replace(SECTION, verdicts=(replace(a, found=0.4), replace(c, found=0.4), replace(d, found=1.0)))
    )
    two = part("casts", replace(SECTION, verdicts=(a, replace(d, found=0.1))))
    two.owed = (b, c)
    three = part("casts")  # left out
    three.owed = tuple(bars)
    both = joined([replace(report, parts=[each]) for each in (one, two, three)])
    assert [(verdict.claim, verdict.found) for verdict in both.verdicts] == [
        ("a", 0.4),
        ("d", 0.1),
        ("b", None),
        ("c", 0.4),
    ]
    assert both.tally == "0 of 4 bars met, 1 not judged"
    assert joined([replace(report, parts=[each]) for each in (two, one)]).tally == "1 of 3 bars met"
    assert two.owed == (b, c), "what is joined stays what it was"


def test_a_bar_of_another_part_is_another_bar(report):
    bar = Verdict(claim="a", bar=0.5, reason="no time")
    left = part("layer")
    left.owed = (bar,)
    judged = part("casts", replace(SECTION, verdicts=(replace(bar, found=1.0),)))
    assert joined([replace(report, parts=[judged, left])]).tally == "1 of 2 bars met, 1 not judged"


def test_results_of_two_machines_are_not_joined(report):
    other = replace(report, facts={"device": "H100"})
    with pytest.raises(ConfigError, match="these differ: device H100"):
        joined([report, other])

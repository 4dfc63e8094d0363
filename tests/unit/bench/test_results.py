"""A report survives its JSON, belongs to no machine, and judges its bars."""

import json
from dataclasses import replace

import pytest

from octavo.bench.reading import load_report
from octavo.bench.render import markdown
from octavo.bench.results import (
    Chart,
    Failure,
    PartRecord,
    Report,
    Section,
    Verdict,
    joined,
    result_name,
)
from octavo.bench.session import failure_of
from octavo.errors import ConfigError

SECTION = Section(
    title="Casts",
    columns=("timed", "speed"),
    rows=(("a <cast>", "1|2 GB/s"),),
    notes=("A note.",),
    chart=Chart(unit="GB/s", series={"Casts": {"a": 1.5}}, line=2.0),
    verdicts=(
        Verdict(claim="share", found=0.9, bar=0.85),
        Verdict(claim="memory", found=0.8, bar=0.75, at_most=True),
    ),
    failures=(Failure(name="b", reason="BackendError: no", trace="Traceback"),),
    raw={"seconds": {"a": [1.0, 2.0]}},
)


@pytest.fixture
def report() -> Report:
    parts = [
        PartRecord(name="casts", seconds=3.0, sections=[SECTION]),
        PartRecord(
            name="layer",
            failure=Failure(name="layer", reason="interrupted"),
            owed=(Verdict(claim="a layer's memory", bar=0.75, at_most=True, reason="interrupted"),),
        ),
    ]
    return Report(
        facts={"device": "H200"}, command="octavo bench", is_rehearsal=False, measured="2026-01-02", parts=parts
    )


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


@pytest.mark.parametrize(
    ("found", "bar", "at_most", "word"),
    [
        (0.85, 0.85, False, "met"),
        (0.84, 0.85, False, "missed"),
        (0.75, 0.75, True, "met"),
        (0.76, 0.75, True, "missed"),
    ],
)
def test_a_bar_is_reached_from_its_side(found, bar, at_most, word):
    verdict = Verdict(claim="x", found=found, bar=bar, at_most=at_most)
    assert str(verdict).startswith(f"{word}: x: {found:.2f} (at {'most' if at_most else 'least'} {bar:.2f})")


def test_the_heading_says_whose_the_bars_are_where_the_card_is_another(report):
    assert "The bars are" not in markdown(report)
    assert "1 of 3 bars met, 1 not judged. The bars are an H200's; this is an H100." in markdown(
        replace(report, facts={"device": "H100"})
    )


def test_markdown_has_the_table_the_bars_and_what_is_missing(report):
    text = markdown(report)
    assert "| timed | speed |\n| --- | --- |\n| a <cast> | 1/2 GB/s |\n\nA note." in text
    assert "1 of 3 bars met, 1 not judged." in text
    assert "- not judged: a layer's memory (at most 0.75): interrupted" in text
    assert "- missed: memory: 0.80 (at most 0.75)" in text
    assert "- Casts: b: BackendError: no" in text
    assert "- part: layer: interrupted" in text
    assert "Ended early: interrupted." in text
    assert "rehearsal" not in text


def test_a_rehearsal_says_that_its_times_mean_nothing(report):
    report.is_rehearsal = True
    assert "the times mean nothing" in markdown(report)


def test_a_result_is_named_by_hardware_and_day():
    assert result_name("hopper", "NVIDIA H100 80GB HBM3", "2026-01-02") == "hopper_nvidia-h100-80gb-hbm3_2026-01-02"


def test_a_failure_keeps_no_folder_of_the_machine():
    try:
        raise ImportError(f"cannot import x ({__file__})\nand more")
    except ImportError as error:
        failure = failure_of("cast", error)
    assert failure.reason == "ImportError: cannot import x (test_results.py)"
    assert 'File "test_results.py"' in failure.trace
    assert "/unit/" not in json.dumps(failure.trace)

"""What a file may hold instead of a report: each is one sentence that names the file and the place."""

import json

import pytest

from benchmarks.hopper.reading import load_report
from octavo.bench.render import markdown
from octavo.bench.results import Chart, Failure, PartRecord, Report, Section, Verdict
from octavo.errors import DataError


@pytest.fixture
def written():
    section = Section(
        title="T",
        columns=("timed",),
        rows=(("a",),),
        chart=Chart(unit="GB/s", series={"T": {"a": 1.5}}, line=2.0),
        verdicts=(Verdict(claim="c", found=0.9, bar=0.85),),
        failures=(Failure(name="b", reason="no"),),
        raw={"seconds": {"a": [1.0]}},
    )
    part = PartRecord(name="casts", sections=[section], owed=(Verdict(claim="d", bar=1.0, reason="no time"),))
    facts = {"device": "H200"}
    return json.loads(Report(facts=facts, command="octavo", is_rehearsal=False, parts=[part]).to_json())


def put(value, *path):
    """Into a table or list, at a place in it."""

    def change(raw):
        *way, last = path
        for step in way:
            raw = raw[step]
        raw[last] = value

    return change


SECTION = ("parts", 0, "sections", 0)
ODD = {
    "facts have no 'device'": put({"torch": "2"}, "facts"),
    "facts must be a table, not None": put(None, "facts"),
    "facts.device must be a string, not 5": put(5, "facts", "device"),
    "parts must be a list, not {}": put({}, "parts"),
    "parts[0].seconds must be a number, not '3'": put("3", "parts", 0, "seconds"),
    "parts[0].seconds must be a number, not True": put(True, "parts", 0, "seconds"),
    "parts[0].failure.reason is missing": put({"name": "x"}, "parts", 0, "failure"),
    "parts[0].owed[0].bar must be a number, not None": put(None, "parts", 0, "owed", 0, "bar"),
    "parts[0].sections[0].verdicts[0].found must be a number, not '1'": put("1", *SECTION, "verdicts", 0, "found"),
    "parts[0].sections[0].rows[0][0] must be a string, not 7": put(7, *SECTION, "rows", 0, 0),
    "a row of the table 'T' has not its 1 columns": put(["a", "b"], *SECTION, "rows", 0),
    "parts[0].sections[0].chart.series.T.a must be a number, not []": put([], *SECTION, "chart", "series", "T", "a"),
    "the section [parts[0].sections[0]] has no key 'more'; it takes title, ": put(1, *SECTION, "more"),
    "is_rehearsal must be true or false, not 'no'": put("no", "is_rehearsal"),
    "measured is '../../x', not a day such as 2026-01-31": put("../../x", "measured"),
    "theme is '../../x', not one of hopper, serving": put("../../x", "theme"),
    "the number 100000000000… of 401 digits is too large": put(10**400, "parts", 0, "seconds"),
}


@pytest.mark.parametrize("wrong", ODD)
def test_a_report_that_was_changed_is_refused_by_the_place(wrong, written, tmp_path):
    ODD[wrong](written)
    path = tmp_path / "r.json"
    path.write_text(json.dumps(written))
    with pytest.raises(DataError) as refused:
        load_report(path)
    text = str(refused.value)
    assert text.startswith(f"{path} is no result of octavo bench: {wrong}")
    assert text.endswith("; give a .json that the command wrote, as it was written")
    assert "\n" not in text


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"parts": [{}]}', '{"parts": [], "facts": {}, "more": 1}', "[" * 100_000, "\x00", "nul"]
)
def test_other_files_are_refused(text, tmp_path):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(DataError, match="no result of octavo bench"):
        load_report(path)


def test_binary_report_file_is_refused(tmp_path):
    path = tmp_path / "r.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="no result of octavo bench"):
        load_report(path)


def test_report_from_before_owed_bars_can_still_be_read(written, tmp_path):
    del written["parts"][0]["owed"]
    for name in ("by", "reason"):
        del written["parts"][0]["sections"][0]["verdicts"][0][name]
    path = tmp_path / "r.json"
    path.write_text(json.dumps(written))
    assert "1 of 1 bars met." in markdown(load_report(path))

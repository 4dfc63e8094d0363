"""A report belongs to no machine, judges its bars, and is drawn."""

from dataclasses import replace

import pytest

from octavo.bench.render import markdown
from octavo.bench.results import Report, Verdict, markdown_table, result_name, write_result
from tests.unit.bench.made_report import made_report


@pytest.fixture
def report() -> Report:
    return made_report()


@pytest.mark.parametrize(
    ("found", "bar", "at_most", "word"),
    [
        (0.85, 0.85, False, "met"),
        (0.84, 0.85, False, "missed"),
        (0.75, 0.75, True, "met"),
        (0.76, 0.75, True, "missed"),
    ],
)
def test_bar_is_a_lower_or_upper_limit(found, bar, at_most, word):
    verdict = Verdict(claim="x", found=found, bar=bar, at_most=at_most)
    assert str(verdict).startswith(f"{word}: x: {found:.2f} (at {'most' if at_most else 'least'} {bar:.2f})")


def test_heading_names_the_bars_device_if_it_differs(report):
    assert "The bars are" not in markdown(report)
    assert "1 of 3 bars met, 1 not judged. The bars are an H200's; this is an H100." in markdown(
        replace(report, facts={"device": "H100"})
    )


def test_markdown_has_tables_bars_and_failures(report):
    text = markdown(report)
    assert "| timed | speed |\n| --- | --- |\n| a <cast> | 1/2 GB/s |\n\nA note." in text
    assert "1 of 3 bars met, 1 not judged." in text
    assert "- not judged: a layer's memory (at most 0.75): interrupted" in text
    assert "- missed: memory: 0.80 (at most 0.75)" in text
    assert "- Casts: b: BackendError: no" in text
    assert "- part: layer: interrupted" in text
    assert "Ended early: interrupted." in text
    assert "rehearsal" not in text


def test_rehearsal_is_marked(report):
    report.is_rehearsal = True
    assert "the times mean nothing" in markdown(report)


def test_a_result_is_named_by_hardware_and_day():
    assert result_name("hopper", "NVIDIA H100 80GB HBM3", "2026-01-02") == "hopper_nvidia-h100-80gb-hbm3_2026-01-02"


def test_files_of_a_result_share_a_name_and_replace_older_ones(tmp_path):
    folder = tmp_path / "new" / "folder"
    for text in ("first", "second"):
        path = write_result(folder, "theme_cpu_2026-01-02", {".md": text, ".json": "{}"})
    assert path == folder / "theme_cpu_2026-01-02"
    assert {each.name: each.read_text() for each in folder.iterdir()} == {
        "theme_cpu_2026-01-02.md": "second",
        "theme_cpu_2026-01-02.json": "{}",
    }


def test_pipes_in_cells_are_replaced():
    assert markdown_table(["a", "b"], [["1|2", "3"]]) == ["| a | b |", "| --- | --- |", "| 1/2 | 3 |"]

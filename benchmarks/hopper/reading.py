"""Reading of reports from JSON, and joining of several reports of one machine.

A file may be of another program, incomplete, or edited by hand. It is checked completely here, and errors name the
wrong place, so that rendering cannot fail half-way.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from octavo.bench.render import THEMES
from octavo.bench.results import PartRecord, Report, Verdict
from octavo.errors import ConfigError, DataError
from octavo.parsing import read_json
from octavo.training.config_values import section

__all__ = ["joined", "load_report"]

DAY = re.compile(r"\d{4}-\d{2}-\d{2}")  # a part of file names


def load_report(path: Path) -> Report:
    """Read a report from its JSON.

    Raises:
        DataError: the file is not a report; names the wrong place.
        OSError: it cannot be opened.
    """
    try:
        report = section(Report, read_json(path), "")
        _check(report)
    except (ConfigError, ValueError, OverflowError) as error:
        raise DataError(
            f"{path} is no result of octavo bench: {error}; give a .json that the command wrote, as it was written"
        ) from error
    return report


def _check(report: Report) -> None:
    """Check constraints that the types of a report do not express."""
    if "device" not in report.facts:
        raise ValueError("facts have no 'device'")
    if DAY.fullmatch(report.measured) is None:
        raise ValueError(f"measured is {report.measured!r}, not a day such as 2026-01-31")
    if report.theme not in THEMES:
        raise ValueError(f"theme is {report.theme!r}, not one of {', '.join(THEMES)}")
    for table in (table for part in report.parts for table in part.sections):
        if any(len(row) != len(table.columns) for row in table.rows):
            raise ValueError(f"a row of the table {table.title!r} has not its {len(table.columns)} columns")


def joined(reports: Sequence[Report]) -> Report:
    """Join reports into one; of a part in several reports, keep the last one with sections.

    A bar without verdict gets that of the last report that judged it.

    Raises:
        ConfigError: the reports come from different hardware or versions.
    """
    first = reports[0]
    for report in reports[1:]:
        if other := [f"{key} {value}" for key, value in report.facts.items() if first.facts.get(key) != value]:
            raise ConfigError(f"results of one machine can be joined, and these differ: {', '.join(other)}")
    parts: dict[str, PartRecord] = {}
    for part in (part for report in reports for part in report.parts):
        if part.sections or part.name not in parts:
            parts[part.name] = part
    judged = {
        (part.name, verdict.claim): verdict
        for report in reports
        for part in report.parts
        for verdict in part.verdicts
        if verdict.is_judged
    }
    return Report(
        facts=first.facts,
        command="; ".join(dict.fromkeys(report.command for report in reports)),
        is_rehearsal=any(report.is_rehearsal for report in reports),
        measured=max(report.measured for report in reports),
        parts=[_judged(part, judged) for part in parts.values()],
        is_interrupted=any(report.is_interrupted for report in reports),
        theme=first.theme,
    )


def _judged(part: PartRecord, judged: Mapping[tuple[str, str], Verdict]) -> PartRecord:
    """Copy of the part in which bars without verdict have those of other reports."""

    def known(verdicts: Sequence[Verdict]) -> tuple[Verdict, ...]:
        return tuple(each if each.is_judged else judged.get((part.name, each.claim), each) for each in verdicts)

    sections = [replace(section, verdicts=known(section.verdicts)) for section in part.sections]
    return replace(part, sections=sections, owed=known(part.owed))

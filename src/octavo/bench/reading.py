"""A report read from the JSON it wrote, and refused by the place that is not as it was written.

A file may be another program's, cut off, or edited by hand. Whatever is in it is looked at here, so that drawing it
cannot fail when half of it is written.
"""

import re
from pathlib import Path

from octavo.bench.render import THEMES
from octavo.bench.results import Report
from octavo.errors import ConfigError, DataError
from octavo.parsing import read_json
from octavo.training.config_values import section

__all__ = ["load_report"]

DAY = re.compile(r"\d{4}-\d{2}-\d{2}")  # a part of file names


def load_report(path: Path) -> Report:
    """A report from the JSON it wrote.

    Raises:
        DataError: the file is no such report; says where.
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
    """What a report's types do not say."""
    if "device" not in report.facts:
        raise ValueError("facts have no 'device'")
    if DAY.fullmatch(report.measured) is None:
        raise ValueError(f"measured is {report.measured!r}, not a day such as 2026-01-31")
    if report.theme not in THEMES:
        raise ValueError(f"theme is {report.theme!r}, not one of {', '.join(THEMES)}")
    for table in (table for part in report.parts for table in part.sections):
        if any(len(row) != len(table.columns) for row in table.rows):
            raise ValueError(f"a row of the table {table.title!r} has not its {len(table.columns)} columns")

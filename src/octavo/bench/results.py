"""What a benchmark found: sections with a table, numbers, bars and what failed; as data that JSON holds.

A report is written again from its JSON alone, so that a page can be drawn on a machine that has what draws it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError, DataError

__all__ = ["Chart", "Failure", "PartRecord", "Report", "Section", "Verdict", "joined", "load_report", "result_name"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A bar, and what was found.

    Attributes:
        claim: what is judged.
        found: the figure.
        bar: the figure to reach.
        at_most: whether it is to stay below.
    """

    claim: str
    found: float
    bar: float
    at_most: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the bar is reached."""
        return self.found <= self.bar if self.at_most else self.found >= self.bar

    def __str__(self) -> str:
        sign = "at most" if self.at_most else "at least"
        word = "met" if self.is_met else "missed"
        return f"{word}: {self.claim}: {self.found:.2f} ({sign} {self.bar:.2f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Bars in groups: by series, then by what stands below them.

    Attributes:
        unit: of the values.
        series: a series' name to its values by label.
        line: a level to compare with, or None.
    """

    unit: str
    series: Mapping[str, Mapping[str, float]]
    line: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Something that could not be measured.

    Attributes:
        name: what.
        reason: why, in a line.
        trace: where it happened; empty where nothing was raised.
    """

    name: str
    reason: str
    trace: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One table and what belongs to it.

    Attributes:
        title: its heading.
        columns: of the table.
        rows: of the table, cells as text.
        notes: sentences below it.
        chart: the same as a picture.
        verdicts: the bars judged here.
        failures: what the table lacks.
        raw: every number behind it: seconds of each round, bytes.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    chart: Chart | None = None
    verdicts: tuple[Verdict, ...] = ()
    failures: tuple[Failure, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class PartRecord:
    """How one part went.

    Attributes:
        name: the part's.
        seconds: how long it took.
        sections: what it found, as far as it came.
        failure: what ended it early, or None.
    """

    name: str
    seconds: float = 0.0
    sections: list[Section] = field(default_factory=list)
    failure: Failure | None = None


@dataclass(slots=True, kw_only=True)
class Report:
    """Everything a run found.

    Attributes:
        facts: the machine and the versions, by name.
        command: what was called.
        is_rehearsal: whether the times mean nothing.
        measured: the day, YYYY-MM-DD.
        parts: in order.
        is_interrupted: whether Ctrl-C ended it.
        theme: what was measured, as files are named: "hopper" or "serving".
    """

    facts: dict[str, str]
    command: str
    is_rehearsal: bool
    measured: str = field(default_factory=lambda: datetime.now(tz=UTC).strftime("%Y-%m-%d"))
    parts: list[PartRecord] = field(default_factory=list)
    is_interrupted: bool = False
    theme: str = "hopper"

    @property
    def verdicts(self) -> list[Verdict]:
        """Every bar judged."""
        return [verdict for part in self.parts for section in part.sections for verdict in section.verdicts]

    @property
    def failures(self) -> list[tuple[str, Failure]]:
        """Everything that could not be measured, and where it belongs."""
        found = []
        for part in self.parts:
            found += [(section.title, failure) for section in part.sections for failure in section.failures]
            found += [("part", part.failure)] if part.failure is not None else []
        return found

    def to_json(self) -> str:
        """The whole, indented little."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"


def load_report(path: Path) -> Report:
    """A report from the JSON it wrote.

    Raises:
        DataError: the file is no such report.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        parts = [_part(part) for part in raw.pop("parts")]
        return Report(**raw, parts=parts)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is no result of octavo bench: {error}") from error


def joined(reports: Sequence[Report]) -> Report:
    """One report of what was measured in several calls; of a part that several have, the last that found anything.

    Raises:
        ConfigError: they come from different hardware or versions.
    """
    first = reports[0]
    for report in reports[1:]:
        if other := [f"{key} {value}" for key, value in report.facts.items() if first.facts.get(key) != value]:
            raise ConfigError(f"results of one machine can be joined, and these differ: {', '.join(other)}")
    parts: dict[str, PartRecord] = {}
    for part in (part for report in reports for part in report.parts):
        if part.sections or part.name not in parts:
            parts[part.name] = part
    return Report(
        facts=first.facts,
        command="; ".join(dict.fromkeys(report.command for report in reports)),
        is_rehearsal=any(report.is_rehearsal for report in reports),
        measured=max(report.measured for report in reports),
        parts=list(parts.values()),
        is_interrupted=any(report.is_interrupted for report in reports),
        theme=first.theme,
    )


def _part(raw: dict[str, Any]) -> PartRecord:
    failure, sections = raw.pop("failure"), raw.pop("sections")
    return PartRecord(
        **raw,
        sections=[_section(section) for section in sections],
        failure=None if failure is None else Failure(**failure),
    )


def _section(raw: dict[str, Any]) -> Section:
    chart = raw.pop("chart")
    return Section(
        title=raw["title"],
        columns=tuple(raw["columns"]),
        rows=tuple(tuple(row) for row in raw["rows"]),
        notes=tuple(raw["notes"]),
        chart=None if chart is None else Chart(**chart),
        verdicts=tuple(Verdict(**verdict) for verdict in raw["verdicts"]),
        failures=tuple(Failure(**failure) for failure in raw["failures"]),
        raw=raw["raw"],
    )


def result_name(theme: str, hardware: str, day: str) -> str:
    """A result's file name without its ending.

    Example:
        >>> result_name("hopper", "NVIDIA H200", "2026-01-31")
        'hopper_nvidia-h200_2026-01-31'
    """
    short = re.sub(r"[^a-z0-9]+", "-", hardware.lower()).strip("-")
    return f"{theme}_{short}_{day}"

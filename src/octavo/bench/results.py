"""Results of a benchmark: sections with a table, numbers, bars and failures, as JSON; and their files.

The JSON has everything that a page needs, so that it can be drawn on another machine.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from octavo.files import write_atomically

__all__ = [
    "Chart",
    "Failure",
    "PartRecord",
    "Report",
    "Section",
    "Verdict",
    "markdown_table",
    "result_name",
    "write_result",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Bar, with the measured figure.

    Attributes:
        claim: claim that is judged; identifies the bar.
        found: measured figure; None if the bar could not be judged.
        bar: figure to reach.
        at_most: whether the figure must be at most the bar, instead of at least.
        by: variant that has the figure; "" if the claim names it.
        reason: reason why the bar could not be judged.
    """

    claim: str
    found: float | None = None
    bar: float
    at_most: bool = False
    by: str = ""
    reason: str = ""

    @property
    def is_judged(self) -> bool:
        """True if there is a figure."""
        return self.found is not None

    @property
    def is_met(self) -> bool:
        """True if the bar is reached."""
        return self.found is not None and (self.found <= self.bar if self.at_most else self.found >= self.bar)

    @property
    def word(self) -> str:
        """Verdict in words."""
        return ("met" if self.is_met else "missed") if self.is_judged else "not judged"

    def __str__(self) -> str:
        bar = f"{'at most' if self.at_most else 'at least'} {self.bar:.2f}"
        if self.found is None:
            return f"{self.word}: {self.claim} ({bar}): {self.reason}"
        by = f" ({self.by})" if self.by else ""
        return f"{self.word}: {self.claim}{by}: {self.found:.2f} ({bar})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Bar chart with grouped bars.

    Attributes:
        unit: unit of the values.
        series: values by label, by name of the series.
        line: level to compare with, or None.
    """

    unit: str
    series: Mapping[str, Mapping[str, float]]
    line: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Something that could not be measured.

    Attributes:
        name: what could not be measured.
        reason: reason, in one line.
        trace: traceback; empty if nothing was raised.
    """

    name: str
    reason: str
    trace: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Table with its notes, chart, verdicts and numbers.

    Attributes:
        title: heading.
        columns: names of the table's columns.
        rows: cells of the table as text.
        notes: sentences below the table.
        chart: chart of the same figures.
        verdicts: bars judged by them.
        failures: reasons for missing rows.
        raw: all numbers behind the table, such as seconds of each round and bytes.
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
    """Result of one part.

    Attributes:
        name: name of the part.
        seconds: duration.
        sections: finished sections.
        failure: failure that ended it early, or None.
        owed: bars of sections that were not reached.
    """

    name: str
    seconds: float = 0.0
    sections: list[Section] = field(default_factory=list)
    failure: Failure | None = None
    owed: tuple[Verdict, ...] = ()

    @property
    def verdicts(self) -> list[Verdict]:
        """All bars, judged or not."""
        return [*(verdict for section in self.sections for verdict in section.verdicts), *self.owed]


@dataclass(slots=True, kw_only=True)
class Report:
    """Results of one run of a benchmark.

    Attributes:
        facts: machine and versions, by name.
        command: command line.
        is_rehearsal: whether shapes were tiny, so that times have no meaning.
        measured: date, YYYY-MM-DD.
        parts: parts in order.
        is_interrupted: whether Ctrl-C ended it.
        theme: "hopper" or "serving"; part of the file names.
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
        """All bars, judged or not."""
        return [verdict for part in self.parts for verdict in part.verdicts]

    @property
    def tally(self) -> str:
        """Number of bars that are met, and of all bars.

        Example:
            >>> part = PartRecord(name="layer", owed=(Verdict(claim="memory", bar=0.75, reason="no time"),))
            >>> Report(facts={"device": "H200"}, command="", is_rehearsal=False, parts=[part]).tally
            '0 of 1 bars met, 1 not judged'
        """
        met = sum(verdict.is_met for verdict in self.verdicts)
        unjudged = sum(not verdict.is_judged for verdict in self.verdicts)
        return f"{met} of {len(self.verdicts)} bars met" + (f", {unjudged} not judged" if unjudged else "")

    @property
    def failures(self) -> list[tuple[str, Failure]]:
        """All failures, each with the title of its section or "part"."""
        failures = []
        for part in self.parts:
            failures += [(section.title, failure) for section in part.sections for failure in section.failures]
            failures += [("part", part.failure)] if part.failure is not None else []
        return failures

    def to_json(self) -> str:
        """Return the report as indented JSON."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"


def result_name(theme: str, hardware: str, day: str) -> str:
    """Return a result's file name without its extension.

    Example:
        >>> result_name("hopper", "NVIDIA H200", "2026-01-31")
        'hopper_nvidia-h200_2026-01-31'
    """
    short = re.sub(r"[^a-z0-9]+", "-", hardware.lower()).strip("-")
    return f"{theme}_{short}_{day}"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; ``|`` in a cell becomes ``/``.

    Example:
        >>> markdown_table(["timed", "speed"], [["copy", "2 GB/s"]])
        ['| timed | speed |', '| --- | --- |', '| copy | 2 GB/s |']
    """
    lines = (columns, ["---"] * len(columns), *rows)
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def write_result(folder: Path, name: str, texts: Mapping[str, str]) -> Path:
    """Write a result's files, and return their common path without the extension.

    Args:
        folder: folder to write to; created if it does not exist.
        name: name from :func:`result_name`.
        texts: content of each file, by extension such as ".md".
    """
    folder.mkdir(parents=True, exist_ok=True)
    for ending, text in texts.items():
        write_atomically(folder / f"{name}{ending}", text)
    return folder / name

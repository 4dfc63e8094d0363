"""Results of a benchmark: sections with a table, numbers, bars and failures, as data that JSON holds; and their files.

A report is drawn again from its JSON alone, on a machine that has what draws it.
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
    """A bar, and what was found.

    Attributes:
        claim: the judged claim, which identifies a bar.
        found: the figure; None where the bar could not be judged.
        bar: the figure to reach.
        at_most: whether it is to stay below.
        by: whose figure it is; "" where the claim says so.
        reason: why the bar could not be judged.
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
        """For a reader."""
        return ("met" if self.is_met else "missed") if self.is_judged else "not judged"

    def __str__(self) -> str:
        wanted = f"{'at most' if self.at_most else 'at least'} {self.bar:.2f}"
        if self.found is None:
            return f"{self.word}: {self.claim} ({wanted}): {self.reason}"
        by = f" ({self.by})" if self.by else ""
        return f"{self.word}: {self.claim}{by}: {self.found:.2f} ({wanted})"


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
        failures: reasons for missing rows.
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
    """Result of one part.

    Attributes:
        name: the part's.
        seconds: how long it took.
        sections: finished sections.
        failure: what ended it early, or None.
        owed: bars of sections that were not reached.
    """

    name: str
    seconds: float = 0.0
    sections: list[Section] = field(default_factory=list)
    failure: Failure | None = None
    owed: tuple[Verdict, ...] = ()

    @property
    def verdicts(self) -> list[Verdict]:
        """Every bar, judged or not."""
        return [*(verdict for section in self.sections for verdict in section.verdicts), *self.owed]


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
        """Every bar, judged or not."""
        return [verdict for part in self.parts for verdict in part.verdicts]

    @property
    def tally(self) -> str:
        """How many bars are met, of how many.

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
        """Everything that could not be measured, and where it belongs."""
        found = []
        for part in self.parts:
            found += [(section.title, failure) for section in part.sections for failure in section.failures]
            found += [("part", part.failure)] if part.failure is not None else []
        return found

    def to_json(self) -> str:
        """The whole, indented little."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"


def result_name(theme: str, hardware: str, day: str) -> str:
    """A result's file name without its ending.

    Example:
        >>> result_name("hopper", "NVIDIA H200", "2026-01-31")
        'hopper_nvidia-h200_2026-01-31'
    """
    short = re.sub(r"[^a-z0-9]+", "-", hardware.lower()).strip("-")
    return f"{theme}_{short}_{day}"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; a cell's own ``|`` becomes ``/``.

    Example:
        >>> markdown_table(["timed", "speed"], [["copy", "2 GB/s"]])
        ['| timed | speed |', '| --- | --- |', '| copy | 2 GB/s |']
    """
    lines = (columns, ["---"] * len(columns), *rows)
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def write_result(folder: Path, name: str, texts: Mapping[str, str]) -> Path:
    """Write a result's files, by ending, and return their common path without it.

    Args:
        folder: created where it does not exist.
        name: from :func:`result_name`.
        texts: of each file, by ending such as ".md".
    """
    folder.mkdir(parents=True, exist_ok=True)
    for ending, text in texts.items():
        write_atomically(folder / f"{name}{ending}", text)
    return folder / name

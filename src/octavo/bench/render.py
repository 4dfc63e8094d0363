"""Reports of benchmarks as Markdown, the form that is committed; octavo.reports.benchmark writes the HTML page."""

from collections.abc import Iterator
from dataclasses import dataclass

from octavo.bench.results import Report, Section, markdown_table

__all__ = ["REHEARSED", "THEMES", "heading", "markdown"]

REHEARSED = "**A rehearsal on a CPU with tiny shapes: the times mean nothing, neither do the bars.** Every part runs."


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """Sentences of a report around its tables.

    Attributes:
        title: title of the Markdown file.
        heading: heading of the page.
        method: description of the measurement.
        bars_for: device that the bars apply to; "" for any.
    """

    title: str
    heading: str
    method: str
    bars_for: str = ""


THEMES = {
    "hopper": Theme(
        title="Hopper",
        heading="octavo on Hopper",
        method=(
            "Medians of rounds; a round runs every variant of a table once, in turn, in one process, on normally "
            "distributed inputs that rotate through more than the L2 cache holds. GPU times are taken between CUDA "
            "events: of casts and products without the launches, of steps and tokens with them. A ratio is the median "
            "of the rounds' ratios, with quartiles."
        ),
        bars_for="H200",
    ),
    "serving": Theme(
        title="Serving",
        heading="octavo serves",
        method=(
            "Medians of rounds; a round asks every target once, in turn, with the same prompts, in one process. "
            "Percentiles are of the answers of all rounds. A request's time counts from when it was due. A ratio is "
            "the median of the rounds' ratios, with quartiles."
        ),
    ),
}


def markdown(report: Report) -> str:
    """Return a report as Markdown."""
    theme = THEMES[report.theme]
    lines = [f"# {theme.title}", "", f"`{report.command}`, {report.measured}", ""]
    lines += [REHEARSED, ""] if report.is_rehearsal else []
    lines += [
        ", ".join(f"{name} {fact}" for name, fact in report.facts.items()),
        "",
        theme.method,
        "",
        *_summary(report),
    ]
    for part in report.parts:
        lines += ["", f"## {part.name}", "", f"{part.seconds:.0f} s."]
        for section in part.sections:
            lines += ["", *_section(section)]
        if part.failure is not None:
            lines += ["", f"Ended early: {part.failure.reason}."]
    return "\n".join(lines) + "\n"


def heading(report: Report) -> str:
    """Sentence with the number of met bars, and their device if it is another."""
    device, bars_for = report.facts["device"], THEMES[report.theme].bars_for
    other = "" if bars_for in device or report.is_rehearsal else f" The bars are an {bars_for}'s; this is an {device}."
    return f"{report.tally}.{other}"


def _summary(report: Report) -> Iterator[str]:
    yield heading(report)
    yield ""
    yield from (f"- {verdict}" for verdict in report.verdicts)
    if report.failures:
        yield ""
        yield "Not measured:"
        yield ""
        yield from (f"- {where}: {failure.name}: {failure.reason}" for where, failure in report.failures)


def _section(section: Section) -> Iterator[str]:
    yield f"### {section.title}"
    yield ""
    if section.rows:
        yield from markdown_table(section.columns, section.rows)
    for note in section.notes:
        yield ""
        yield note

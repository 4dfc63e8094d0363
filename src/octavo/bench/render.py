"""A report as Markdown, which is what is committed, and as one HTML page with pictures, which needs plotly."""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from octavo.bench.results import Chart, PartRecord, Report, Section, markdown_table
from octavo.pages import plotly_script

__all__ = ["markdown", "page"]

REHEARSED = "**A rehearsal on a CPU with tiny shapes: the times mean nothing, neither do the bars.** Every part runs."


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """What a report says around its tables.

    Attributes:
        title: of the Markdown.
        heading: of the page.
        method: how it was measured.
        bars_for: the device whose bars they are; "" for any.
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
COLOURS = ("#d9480f", "#2563eb", "#0f766e", "#7c3aed", "#be185d", "#64748b", "#b45309", "#15803d")
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2328; max-width: 1080px; margin: 40px auto; padding: 0 24px; }
table { border-collapse: collapse; font-size: 14px; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 10px; border-bottom: 1px solid #e2dfd8; text-align: right; }
th:first-child, td:first-child { text-align: left; }
.met { color: #15803d; } .missed { color: #b91c1c; } .not-judged { color: #64748b; } .plot { height: 420px; }
.wide { overflow-x: auto; } h2 { margin-top: 48px; }
"""


def markdown(report: Report) -> str:
    """The whole report."""
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


def _heading(report: Report) -> str:
    device, bars_for = report.facts["device"], THEMES[report.theme].bars_for
    other = "" if bars_for in device or report.is_rehearsal else f" The bars are an {bars_for}'s; this is an {device}."
    return f"{report.tally}.{other}"


def _summary(report: Report) -> Iterator[str]:
    yield _heading(report)
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


def page(report: Report) -> str:
    """The report with a picture for every table, in one file that loads nothing.

    Raises:
        ConfigError: plotly is not installed.
    """
    theme = THEMES[report.theme]
    script = plotly_script(
        "the page with pictures",
        after=", then python -m benchmarks.hopper --from RESULT.json draws it from the numbers",
    )
    warning = f"<p><strong>{escape(REHEARSED.replace('*', ''))}</strong></p>" if report.is_rehearsal else ""
    facts = "".join(f"<li>{escape(name)}: {escape(fact)}</li>" for name, fact in report.facts.items())
    bars = "".join(
        f'<li class="{verdict.word.replace(" ", "-")}">{escape(str(verdict))}</li>' for verdict in report.verdicts
    )
    missing = "".join(
        f"<li>{escape(where)}: {escape(failure.name)}: {escape(failure.reason)}</li>"
        for where, failure in report.failures
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{theme.heading}</title>'
        f'<link rel="icon" href="data:,"><style>{STYLE}</style><script>{script}</script></head><body>'
        f"<h1>{theme.heading}</h1><p><code>{escape(report.command)}</code>, {report.measured}</p>"
        f"{warning}<ul>{facts}</ul>"
        f"<p>{escape(theme.method)}</p><h2>Bars</h2><p>{escape(_heading(report))}</p><ul>{bars}</ul>"
        f"{f'<h2>Not measured</h2><ul>{missing}</ul>' if missing else ''}"
        f"{''.join(map(_part_html, report.parts))}</body></html>\n"
    )


def _part_html(part: PartRecord) -> str:
    sections = "".join(map(_section_html, part.sections))
    ended = f"<p>Ended early: {escape(part.failure.reason)}.</p>" if part.failure is not None else ""
    return f"<h2>{escape(part.name)}</h2>{sections}{ended}"


def _section_html(section: Section) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in section.columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in section.rows)
    notes = "".join(f"<p>{escape(text)}</p>" for text in section.notes)
    table = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    picture = "" if section.chart is None else f'<div class="plot">{_figure(section.chart)}</div>'
    return f"<h3>{escape(section.title)}</h3>{picture}{table}{notes}"


def _figure(chart: Chart) -> str:
    import plotly.graph_objects as go
    import plotly.io

    figure = go.Figure()
    for index, (name, values) in enumerate(chart.series.items()):
        colour = COLOURS[index % len(COLOURS)]
        figure.add_bar(x=list(values), y=list(values.values()), name=name, marker={"color": colour})
    if chart.line is not None:
        figure.add_hline(y=chart.line, line={"dash": "dot", "color": "#6b7280"})
    figure.update_layout(
        template="none", barmode="group", showlegend=len(chart.series) > 1, margin={"l": 70, "r": 10, "t": 10, "b": 90}
    )
    figure.update_yaxes(title=chart.unit, automargin=True)
    figure.update_xaxes(automargin=True)
    settings = {"displayModeBar": False}  # it lies over the legend
    html: str = plotly.io.to_html(
        figure, full_html=False, include_plotlyjs=False, default_height="100%", config=settings
    )
    return html

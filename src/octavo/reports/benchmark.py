"""HTML page of a benchmark's report: its bars, and a figure for every table."""

from typing import Any

from octavo.bench.render import REHEARSED, THEMES, heading
from octavo.bench.results import Chart, Report
from octavo.reports.figures import PALETTE, add_level, new_figure, plain
from octavo.reports.rendering import check_report_extra, render

__all__ = ["benchmark_page"]

COLOURS = [PALETTE[name] for name in ("orange", "blue", "teal", "violet", "pink", "slate", "amber", "lime")]


def benchmark_page(report: Report) -> str:
    """HTML of a report.

    Raises:
        ConfigError: plotly or jinja2 is not installed.
    """
    then = ", then the command with --from RESULT.json draws it from the numbers"
    check_report_extra("the page with pictures", then=then)
    theme = THEMES[report.theme]
    return render(
        "benchmark",
        report=report,
        heading=theme.heading,
        method=theme.method,
        tally=heading(report),
        rehearsal=REHEARSED.replace("*", "") if report.is_rehearsal else "",
        colours=_colours,
        figure=_figure,
    )


def _colours(chart: Chart) -> dict[str, str]:
    return {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(chart.series)}


def _figure(chart: Chart) -> Any:
    figure = new_figure(plain(chart.unit), x="")
    for name, colour in _colours(chart).items():
        values = {plain(label): value for label, value in chart.series[name].items()}
        figure.add_bar(x=list(values), y=list(values.values()), name=plain(name), marker={"color": colour})
    if chart.line is not None:
        add_level(figure, chart.line, "")
    figure.update_layout(barmode="group", hovermode="closest", margin={"b": 28})
    figure.update_xaxes(type="category", automargin=True, showgrid=False)
    return figure

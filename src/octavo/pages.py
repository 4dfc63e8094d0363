"""What octavo's HTML pages share: the look of text and of figures, and plotly's script inlined.

A page is one file that opens anywhere, offline: its style, its data and plotly's script (about 5 MB) are in it. plotly
is the ``report`` extra, imported here only, when a page is asked for.
"""

from collections.abc import Iterable
from html import escape
from string import Template
from typing import Any

from octavo.curves import Curve
from octavo.errors import ConfigError

__all__ = [
    "GRID",
    "INK",
    "MUTED",
    "figure_html",
    "legend",
    "level",
    "line",
    "page_template",
    "plotly_script",
    "points",
    "step_figure",
]

INK, MUTED, GRID = "#1f2328", "#6b7280", "#e7e5e0"

STYLE = """
:root { --ink: #1f2328; --muted: #6b7280; --rule: #e2dfd8; --paper: #fbfaf7; --sheet: #ffffff; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 44px 28px 72px; }
.eyebrow { font-size: 12.5px; letter-spacing: .14em; text-transform: uppercase; color: var(--muted); margin: 0 0 10px; }
h1, h2 { font-family: "Iowan Old Style", "Palatino Linotype", Palatino, "URW Palladio L", Georgia, serif;
  font-weight: 600; text-wrap: balance; }
h1 { font-size: clamp(25px, 3.5vw, 38px); line-height: 1.22; margin: 0 0 14px; max-width: 27em; }
h2 { font-size: 22px; margin: 46px 0 4px; }
.standfirst { font-size: 18px; color: #454b54; margin: 0 0 28px; max-width: 46em; }
.caption { color: var(--muted); font-size: 14.5px; margin: 0 0 12px; max-width: 56em; }
.legend { margin: 0 0 8px; font-size: 14px; display: flex; flex-wrap: wrap; gap: 2px 20px; }
.legend span::before { content: ""; display: inline-block; width: 18px; height: 3px; border-radius: 2px;
  background: var(--accent); margin-right: 7px; vertical-align: middle; }
.plot { background: var(--sheet); border: 1px solid var(--rule); border-radius: 6px; padding: 12px 8px 4px;
  height: 430px; }
@media (max-width: 700px) {
  main { padding: 26px 14px 48px; }
  .standfirst { font-size: 16.5px; }
  .plot { height: 340px; padding: 8px 0 0; }
}
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>{body}</body>
</html>
"""


def page_template(title: str, *, style: str, body: str) -> Template:
    """A whole page with the shared look, its ``$places`` still to be filled in.

    Args:
        title: of the browser's tab.
        style: CSS after what all pages share.
        body: HTML.
    """
    return Template(PAGE.format(title=title, style=STYLE + style, body=body))


def plotly_script(page: str, *, after: str = "") -> str:
    """Plotly's script, to stand in a page.

    Args:
        page: what is to be drawn, as the error says it.
        after: what to do once plotly is installed, where there is more to do than to try again.

    Raises:
        ConfigError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ConfigError(
            f"{page} needs plotly, which is not installed; pip install 'octavo[report]'{after}"
        ) from error
    script: str = get_plotlyjs()
    return script


def step_figure(unit: str) -> Any:
    """A figure over steps with the pages' look, still empty."""
    import plotly.graph_objects as go

    drawn = go.Figure()
    drawn.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13, "color": INK},
        margin={"l": 58, "r": 12, "t": 8, "b": 44},
        hovermode="x unified",
        showlegend=False,
        autosize=True,
    )
    drawn.update_xaxes(title="step", gridcolor=GRID, zeroline=False, ticks="", linecolor=MUTED, rangemode="tozero")
    drawn.update_yaxes(title=unit, gridcolor=GRID, zeroline=False, ticks="", automargin=True)
    return drawn


def figure_html(drawn: Any) -> str:
    """A figure as HTML that fills its place, in a page that holds plotly's script."""
    import plotly.io

    config = {"displayModeBar": False, "responsive": True}
    text: str = plotly.io.to_html(
        drawn, full_html=False, include_plotlyjs=False, config=config, default_width="100%", default_height="100%"
    )
    return text


def line(drawn: Any, curve: Curve, name: str, colour: str, *, width: float, opacity: float = 0.5) -> None:
    """Add a curve as a thin line."""
    steps, values = _columns(curve)
    style = {"color": colour, "width": width}
    drawn.add_scatter(x=steps, y=values, name=name, mode="lines", opacity=opacity, line=style)


def points(drawn: Any, curve: Curve, name: str, colour: str, *, width: float = 2.0) -> None:
    """Add a curve of few points, each marked."""
    steps, values = _columns(curve)
    style = {"line": {"color": colour, "width": width}, "marker": {"color": colour, "size": 5 + width}}
    drawn.add_scatter(x=steps, y=values, name=name, mode="lines+markers", **style)


def level(drawn: Any, value: float, label: str, *, position: str = "top right") -> None:
    """Add a dotted horizontal line with a label."""
    drawn.add_hline(
        y=value,
        line={"color": MUTED, "dash": "dot", "width": 1.2},
        annotation={"text": label, "font": {"size": 11.5, "color": MUTED}},
        annotation_position=position,
    )


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Names with their colours, as HTML.

    Example:
        >>> legend([("a < b", "#2563eb")])
        '<span style="--accent:#2563eb">a &lt; b</span>'
    """
    return "".join(f'<span style="--accent:{colour}">{escape(name)}</span>' for name, colour in entries)


def _columns(curve: Curve) -> tuple[list[int], list[float]]:
    return [step for step, _ in curve], [value for _, value in curve]

"""Plotly figures in the style of all pages.

Colours are names of templates/style.css, which has a value of each for light and for dark mode; the script of
templates/base.html.jinja replaces them by these values before plotly draws.
"""

import re
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

from octavo.curves import Curve

__all__ = [
    "GRID",
    "INK",
    "MISSING",
    "MUTED",
    "PALE",
    "PALETTE",
    "SHEET",
    "TINTED",
    "WARM",
    "add_level",
    "add_line",
    "add_points",
    "light_colours",
    "new_figure",
    "plain",
]

INK, MUTED, GRID, SHEET = (f"var(--{name})" for name in ("ink", "muted", "grid", "sheet"))
# Heat maps: not measured; healthy, from nothing to the limit; from the limit on.
MISSING, PALE, TINTED = (f"var(--{name})" for name in ("missing", "pale", "tinted"))
WARM = tuple(f"var(--warm-{number})" for number in (1, 2, 3, 4))
PALETTE = {
    name: f"var(--{name})"
    for name in ("blue", "orange", "teal", "violet", "pink", "slate", "cyan", "lime", "amber", "silver")
}


def new_figure(unit: str, *, x: str = "step", panels: Sequence[str] = (), gap: float = 0.07) -> Any:
    """An empty figure with titled axes, a step of training on the horizontal one by default.

    Args:
        unit: title of the vertical axis.
        x: title of the horizontal axis.
        panels: titles of panels below each other, which share the horizontal axis; empty for one panel without a title.
        gap: space between panels, as a share of the figure.
    """
    import plotly.graph_objects as go

    figure = _with_panels(panels, gap) if panels else go.Figure()
    figure.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13, "color": INK},
        margin={"l": 58, "r": 12, "t": 8, "b": 44},
        hovermode="x unified",
        hoverlabel={"bgcolor": SHEET, "bordercolor": MUTED, "font": {"color": INK}},
        showlegend=False,
        autosize=True,
    )
    figure.update_xaxes(gridcolor=GRID, zeroline=False, ticks="", linecolor=MUTED, rangemode="tozero")
    figure.update_xaxes(title=x, **({"row": len(panels), "col": 1} if panels else {}))
    figure.update_yaxes(title=unit, gridcolor=GRID, zeroline=False, ticks="", automargin=True)
    return figure


def _with_panels(titles: Sequence[str], gap: float) -> Any:
    from plotly.subplots import make_subplots

    rows, texts = len(titles), [plain(title) for title in titles]
    figure = make_subplots(rows=rows, cols=1, shared_xaxes=True, subplot_titles=texts, vertical_spacing=gap)
    figure.update_annotations(font_size=13)
    return figure


def add_line(figure: Any, curve: Curve, name: str, colour: str, *, width: float, opacity: float = 0.5) -> None:
    """Add a curve as a thin line."""
    steps, values = _columns(curve)
    style = {"color": colour, "width": width}
    figure.add_scatter(x=steps, y=values, name=plain(name), mode="lines", opacity=opacity, line=style)


def add_points(figure: Any, curve: Curve, name: str, colour: str, *, width: float = 2.0) -> None:
    """Add a curve of few points, each marked."""
    steps, values = _columns(curve)
    style = {"line": {"color": colour, "width": width}, "marker": {"color": colour, "size": 5 + width}}
    figure.add_scatter(x=steps, y=values, name=plain(name), mode="lines+markers", **style)


def add_level(figure: Any, value: float, label: str, *, axis: str = "y", position: str = "top right") -> None:
    """Add a dotted line across the figure at a value of an axis, with a label."""
    add = figure.add_hline if axis == "y" else figure.add_vline
    add(
        **{axis: value},
        line={"color": MUTED, "dash": "dot", "width": 1.2},
        annotation={"text": plain(label), "font": {"size": 11.5, "color": MUTED}},
        annotation_position=position,
    )


def light_colours() -> dict[str, str]:
    """Values of light mode, by the colours of figures.

    Example:
        >>> light_colours()[INK]
        '#1f2328'
    """
    sheet = resources.files("octavo.reports").joinpath("templates", "style.css").read_text(encoding="utf-8")
    light, _, _ = sheet.partition("@media (prefers-color-scheme: dark)")
    return {f"var({name})": value for name, value in re.findall(r"(--[\w-]+): (#[0-9a-f]{6});", light)}


def plain(text: str) -> str:
    """Escape text for plotly, which interprets ``<b>`` and the like as markup.

    Example:
        >>> plain("a < b & c")
        'a &lt; b &amp; c'
    """
    return escape(text, quote=False)


def _columns(curve: Curve) -> tuple[list[int], list[float]]:
    return [step for step, _ in curve], [value for _, value in curve]

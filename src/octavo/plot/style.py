"""Figures of octavo.plot: the style of the pages on a white card, readable in light and dark notebooks."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.reports.figures import light_colours, new_figure
from octavo.reports.rendering import check_library

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["depth_colours", "in_light", "notebook_figure", "small_title"]


def notebook_figure(unit: str, *, x: str = "step", panels: Sequence[str] = (), gap: float = 0.07) -> "Figure":
    """An empty figure on white; see :func:`octavo.reports.figures.new_figure`.

    Raises:
        ConfigError: plotly is not installed.
    """
    check_library("octavo.plot", "plotly", "plotly.subplots")
    figure: Figure = new_figure(unit, x=x, panels=panels, gap=gap)
    figure.update_layout(paper_bgcolor="white", plot_bgcolor="white", margin={"t": 40, "b": 50, "r": 20})
    return figure


def in_light(figure: "Figure") -> "Figure":
    """The figure with the values of light mode for the names of colours: a notebook has no style sheet of ours."""
    from plotly.graph_objects import Figure

    colours = light_colours()
    parts = (*figure.data, figure.layout)  # whose arrays stay arrays, unlike those of the figure's own JSON
    *data, layout = (_replaced(part.to_plotly_json(), colours) for part in parts)
    return Figure(data=data, layout=layout)


def _replaced(value: Any, colours: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return colours.get(value, value)
    if isinstance(value, dict):
        return {key: _replaced(item, colours) for key, item in value.items()}
    return [_replaced(item, colours) for item in value] if isinstance(value, (list, tuple)) else value


def depth_colours(count: int) -> list[str]:
    """Colours from the first layer to the last, dark blue to green.

    Example:
        >>> depth_colours(1)
        ['rgb(68, 1, 84)']
    """
    from plotly.colors import sample_colorscale

    darkest, palest = 0.0, 0.8  # yellow, beyond, is too pale on white
    step = (palest - darkest) / max(1, count - 1)
    colours: list[str] = sample_colorscale("Viridis", [darkest + step * index for index in range(count)])
    return colours


def small_title(text: str) -> dict[str, Any]:
    """A figure's title, at the left edge.

    Example:
        >>> small_title("codes")["text"]
        'codes'
    """
    return {"text": text, "font": {"size": 13}, "x": 0.02, "y": 0.97}

"""Heat map of the values that casts lose: every layer, step by step."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.doctor.series import Series
from octavo.doctor.statistics_catalog import PageStatistic, StatisticKind, all_statistics
from octavo.doctor.thresholds import Thresholds
from octavo.doctor.watch import Watcher
from octavo.errors import ConfigError
from octavo.html.wording import percent
from octavo.plot.loss_curves import series_from
from octavo.plot.style import in_light, notebook_figure
from octavo.reports.figures import MISSING, PALE, TINTED, WARM, plain
from octavo.reports.packing import CellMap, Columns, cell_maps, columns_of, layers_of

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["heat_map"]

MOST_COLUMNS = 120
MARGINS, GAP = 90, 36  # of a figure, and between its panels; pixels
BELOW_LIMIT = 100  # colours begin at a hundredth of the healthy limit


def heat_map(run: str | Path | Watcher | Series, statistic: str = "saturation_fraction") -> "Figure":
    """Share of values that each cast loses, a panel per role: layers down, steps across; pale is healthy.

    The map of ``octavo doctor --html``, for one statistic; a column of several samples shows their worst. Of a
    mixture's experts that are linear layers each, it has the one with the lowest SQNR.

    | statistic             | share, 0 to 1                                                       |
    |-----------------------|---------------------------------------------------------------------|
    | `saturation_fraction` | elements beyond the largest value that the scale represents         |
    | `underflow_fraction`  | nonzeros whose code is zero                                         |
    | `code_mismatch`       | codes that are not those of the tensor under its scale              |

    Args:
        run: a watcher, its series, or a run's folder.
        statistic: one of the table.

    Raises:
        ConfigError: another statistic, a folder without a run, a run whose layers were not sampled, or plotly is not
            installed.

    Example:
        >>> import torch, octavo, octavo.doctor
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        >>> _ = octavo.convert(model, "tensorwise")
        >>> watcher = octavo.doctor.watch(model, interval=1)
        >>> with watcher.step():
        ...     model(torch.ones(4, 8)).sum().backward()
        >>> figure = heat_map(watcher, "underflow_fraction")
        >>> [panel.text for panel in figure.layout.annotations], figure.data[0].customdata.tolist()
        (['input', 'weight', 'grad_output'], [[0.0]])
    """
    chosen = _statistic(statistic)
    series = series_from(run)
    steps = series.casts.steps
    layers = layers_of(series)
    maps = cell_maps(series, chosen, columns := columns_of(steps, most=MOST_COLUMNS), layers) if len(steps) else []
    if not maps:
        raise ConfigError(
            "no layer was sampled: watch a converted model with octavo.doctor.watch, or train with statistics_interval"
        )
    limit = chosen.high
    assert limit
    heights = [max(60.0, min(22.0, 600 / len(one.rows)) * len(one.rows)) for one in maps]
    height = MARGINS + GAP * len(maps) + sum(heights)
    figure = notebook_figure("", panels=[one.name for one in maps], gap=GAP / height)
    for row, one in enumerate(maps, 1):
        _draw(figure, one, layers, columns, limit, row=row)
    figure.update_layout(coloraxis=_colour_axis(limit), plot_bgcolor=MISSING, hovermode="closest", height=height)
    figure.update_xaxes(showgrid=False, rangemode="normal")
    return in_light(figure)


def _statistic(name: str) -> PageStatistic:
    lost = {
        one.field: one
        for one in all_statistics(Thresholds())
        if one.table == "casts" and one.kind is StatisticKind.FRACTION and one.high
    }
    if name not in lost:
        raise ConfigError(f"heat_map draws {', '.join(lost)}, not {name!r}")
    return lost[name]


def _draw(figure: "Figure", one: CellMap, layers: Sequence[str], columns: Columns, limit: float, *, row: int) -> None:
    cells = one.cells.astype(np.float32)
    figure.add_heatmap(
        z=np.log10(np.maximum(cells, limit / BELOW_LIMIT)), customdata=cells, coloraxis="coloraxis",
        row=row, col=1, x=columns.first, y=[plain(layers[index] or "the model itself") for index in one.rows],
        hovertemplate=f"%{{y}}, from step %{{x}}: %{{customdata:.3~%}}<extra>{plain(one.name)}</extra>",
    )  # fmt: skip
    figure.update_yaxes(row=row, col=1, autorange="reversed", showgrid=False)


def _colour_axis(limit: float) -> dict[str, Any]:
    """Logarithmic colours from a hundredth of the healthy limit to 100 %: pale up to the limit, then warm."""
    low = math.log10(limit / BELOW_LIMIT)
    at_limit = math.log10(BELOW_LIMIT) / -low
    warm = [(at_limit + (1 - at_limit) * place / (len(WARM) - 1), colour) for place, colour in enumerate(WARM)]
    ticks = {math.log10(limit): f"<b>{percent(limit)}</b>"} | {
        power: percent(10.0**power) for power in range(math.ceil(low), 1)
    }
    return {
        "cmin": low,
        "cmax": 0.0,
        "colorscale": [(0.0, PALE), (at_limit, TINTED), *warm],
        "colorbar": {
            "thickness": 11,
            "outlinewidth": 0,
            "len": 300,
            "lenmode": "pixels",
            "y": 1,
            "yanchor": "top",
            "tickvals": list(ticks),
            "ticktext": list(ticks.values()),
        },
    }

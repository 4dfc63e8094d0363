"""The page: the verdict first, then what it rests on.

The heat map's numbers are embedded as 16-bit codes (cells.py) and decoded when they are shown; everything that moves is
in page.js, everything that looks in style.py. The loss is drawn by plotly's Python side, the rest by its script, in the
same layout.
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from octavo.doctor.findings import Finding, worst_first
from octavo.doctor.report import cells, loss
from octavo.doctor.report import findings as said
from octavo.doctor.report.histogram import Histogram
from octavo.doctor.report.shown import STATISTIC_OF_CODE, Statistic, all_statistics
from octavo.doctor.report.style import PAGE
from octavo.doctor.series import Series
from octavo.doctor.thresholds import Thresholds
from octavo.pages import legend, plotly_script, step_figure
from octavo.parsing import parse_json

__all__ = ["render"]

NO_HISTOGRAM = (
    "No captured tensor of a finding has one scale. One with a scale for each row or block lies on many grids, and one "
    "in BF16 on none of FP8's."
)
RUN_WIDE = ("loss-gap", "loss-scale", "learning-rate", "gradient-below-noise", "nondeterministic")


def render(
    series: Series,
    findings: Sequence[Finding],
    *,
    title: str,
    reference: Series | None = None,
    histograms: Sequence[Histogram] = (),
    thresholds: Thresholds | None = None,
) -> str:
    """The page's HTML, self-contained.

    Args:
        series: what was measured.
        findings: what ``diagnose`` says of it; remedies that were replayed show what they removed and cost.
        title: the run's name.
        reference: a run to compare the loss with, in BF16 as a rule.
        histograms: captured tensors to draw against their format's grid.
        thresholds: those that ``diagnose`` compared with: where the map's healthy ranges end; None for the defaults.

    Raises:
        ConfigError: plotly is not installed.

    Example:
        >>> from octavo.doctor.series import series_of
        >>> page = render(series_of([]), [], title="a <small> run")
        >>> "a &lt;small&gt; run" in page, "Nothing was measured" in page
        (True, True)
    """
    script = plotly_script("report.html")
    ordered = worst_first(list(findings))
    data = _data(series, ordered, histograms, thresholds or Thresholds()) | _figures(series, reference)
    looks, layers = len(series.casts.steps), len({key.path for key in series.casts.keys})
    return PAGE.substitute(
        title=escape(title),
        headline=escape(said.headline(ordered, looks, layers)),
        standfirst=escape(f"{_scope(series)} {said.counts(ordered)}"),
        findings=said.cards(ordered, [place is not None for place in data["findings"]]),
        loss_legend=legend((name, loss.COLOURS[name]) for name in ("run", "reference")[: 1 + (reference is not None)]),
        loss="" if _has_loss(series) else "<p>The run's lines hold no loss.</p>",
        gap="" if data["gap"] is not None else "<p>There is no reference run to compare with.</p>",
        map="" if data["statistics"] else "<p>No statistics: no layer of this run was looked at.</p>",
        map_note=_map_note(data),
        histogram="" if histograms else f"<p>{NO_HISTOGRAM}</p>",
        data=_json(data),
        plotly=script,
        script=resources.files("octavo.doctor.report").joinpath("page.js").read_text(encoding="utf-8"),
    )


def _data(
    series: Series, findings: Sequence[Finding], histograms: Sequence[Histogram], thresholds: Thresholds
) -> dict[str, Any]:
    layers = cells.layers_of(series)
    data: dict[str, Any] = {"layers": layers, "facts": {path: _facts(series.layers.get(path, {})) for path in layers}}
    data["histograms"] = [one.facts() for one in histograms]
    data["statistics"] = []
    steps = series.casts.steps
    if len(steps):
        columns = cells.columns_of(steps)
        data |= {"edges": columns.edges.tolist(), "first": columns.first.tolist(), "last": columns.last.tolist()}
        data["looks"] = -(-len(steps) // len(columns.starts))
        for statistic in all_statistics(thresholds, series.modules):
            if sheets := cells.sheets(series, statistic, columns):
                data["statistics"].append(_entry(statistic) | {"sheets": sheets})
    data["findings"] = [_target(one, data) for one in findings]
    return data


def _figures(series: Series, reference: Series | None) -> dict[str, Any]:
    layout = step_figure("").to_plotly_json()["layout"]
    return {
        "layout": layout,
        "loss": parse_json(loss.loss_figure(series, reference).to_json()) if _has_loss(series) else None,
        "gap": None if reference is None else parse_json(loss.gap_figure(series, reference).to_json()),
    }


def _entry(statistic: Statistic) -> dict[str, Any]:
    fields = ("name", "table", "title", "kind", "meaning", "low", "high")
    return {name: getattr(statistic, name) for name in fields}


def _target(one: Finding, data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Where a finding is to be seen: a sheet's row, or the loss; None where nothing shows it."""
    target: dict[str, Any] = {"first": one.first_step, "last": one.last_step, "severity": str(one.severity)}
    path = next(iter(one.places), one.path)
    if path not in data["layers"]:
        return target | {"statistic": None} if not path or one.code in RUN_WIDE else None
    layer = data["layers"].index(path)
    order = {name: index for index, name in enumerate(STATISTIC_OF_CODE.get(one.code, ()))}
    best = sorted(data["statistics"], key=lambda entry: order.get(entry["name"], len(order)))
    for entry in best:
        having = [index for index, sheet in enumerate(entry["sheets"]) if layer in sheet["rows"]]
        matching = [index for index in having if entry["sheets"][index]["role"] == one.role]
        if having:
            sheet = (matching or having)[0]
            return target | {"statistic": entry["name"], "sheet": sheet, "layer": layer}
    return None


def _facts(facts: Mapping[str, Any]) -> str:
    """A layer's recipe and shape in a few words."""
    if not facts:
        return ""
    window = f", history of {facts['history_length']}" if "history_length" in facts else ""
    return f"{facts['recipe']}{window}, {facts['in_features']:,} → {facts['out_features']:,}"


def _scope(series: Series) -> str:
    steps, layers = series.casts.steps, dict.fromkeys(key.path for key in series.casts.keys)
    if not len(steps):
        return "No layer was looked at."
    recipes = sorted({str(series.layers[path]["recipe"]) for path in layers if path in series.layers})
    named = f" ({', '.join(recipes)})" if recipes else ""
    when = f"from step {int(steps[0]):,} to {int(steps[-1]):,}"
    return f"FP8 layers{named}: {len(layers):,}, looked at {len(steps):,} times {when}."


def _has_loss(series: Series) -> bool:
    return bool(len(series.curve("loss")[0]) or len(series.curve("nats")[0]))


def _map_note(data: Mapping[str, Any]) -> str:
    if not data["statistics"]:
        return ""
    looks = data["looks"]
    gathered = "" if looks == 1 else f" Each column gathers {looks} looks and shows the worst."
    return (
        f"Pale is healthy, grey was not measured; a statistic without a healthy range is blue.{gathered} "
        "Click a cell, or move with the arrow keys, to see that layer's curves."
    )


def _json(data: Any) -> str:
    """JSON that may stand in a script element."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")

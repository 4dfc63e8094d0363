"""The doctor's page: the verdict, the findings, and the numbers that they come from.

The heat map's numbers are embedded as 16-bit codes (packing.py). templates/doctor.js decodes them and draws the map, a
layer's curves and the histogram in the layout of the figures here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from octavo.doctor.findings import Finding, worst_first
from octavo.doctor.histograms import Histogram
from octavo.doctor.losses import plateau_of_unknown_text
from octavo.doctor.series import Series
from octavo.doctor.statistics_catalog import STATISTIC_OF_CODE, all_statistics
from octavo.doctor.thresholds import Thresholds
from octavo.reports import findings as wording
from octavo.reports import packing
from octavo.reports.doctor_figures import COLOURS, gap_figure, loss_figure
from octavo.reports.figures import MISSING, PALE, TINTED, WARM, new_figure
from octavo.reports.rendering import check_report_extra, render

__all__ = ["doctor_page"]

RUN_WIDE = ("loss-gap", "loss-scale", "learning-rate", "gradient-below-noise", "nondeterministic")


def doctor_page(
    series: Series,
    findings: Sequence[Finding],
    *,
    title: str,
    reference: Series | None = None,
    histograms: Sequence[Histogram] = (),
    thresholds: Thresholds | None = None,
) -> str:
    """HTML of a run's diagnosis.

    Args:
        series: the run's statistics.
        findings: result of ``diagnose``; replayed remedies show their effect and cost.
        title: the run's name.
        reference: a run to compare the loss with, usually in BF16.
        histograms: captured tensors to draw on their format's grid.
        thresholds: limits of ``diagnose``, which end the map's healthy ranges; None for the defaults.

    Raises:
        ConfigError: plotly or jinja2 is not installed.

    Example:
        >>> from octavo.doctor.series import series_of
        >>> page = doctor_page(series_of([]), [], title="a <small> run")
        >>> "a &lt;small&gt; run" in page, "Nothing was measured" in page
        (True, True)
    """
    check_report_extra("report.html")
    ordered, limits = worst_first(list(findings)), thresholds or Thresholds()
    data, stalled = _data(series, ordered, histograms, limits), plateau_of_unknown_text(series, limits)
    names = ("run", "reference")[: 1 + (reference is not None)]
    return render(
        "doctor",
        title=title,
        headline=wording.headline(ordered, len(series.casts.steps), len(_cast_paths(series)), stalled),
        standfirst=f"{_scope(series)} {wording.counts(ordered)}",
        cards=[(index, *pair) for index, pair in enumerate(zip(ordered, data["findings"], strict=True))],
        words=wording,
        loss_legend=[(name, COLOURS[name]) for name in names],
        loss=loss_figure(series, reference) if _has_loss(series) else None,
        gap=None if reference is None else gap_figure(series, reference),
        data=data,
    )


def _data(
    series: Series, findings: Sequence[Finding], histograms: Sequence[Histogram], thresholds: Thresholds
) -> dict[str, Any]:
    """Plain data for doctor.js."""
    named = {path for one in findings for path in (one.path, *one.places)}
    layers = packing.layers_of(series, named)
    data: dict[str, Any] = {
        "layers": layers,
        "experts_left_out": len(packing.other_experts(series, named)),
        "facts": {path: _facts(series.layers.get(path, {})) for path in layers},
        "histograms": [one.facts() for one in histograms],
        "colours": {"missing": MISSING, "pale": PALE, "tinted": TINTED, "warm": WARM},
        "layout": new_figure("").to_plotly_json()["layout"],
        "statistics": [],
    }
    steps = series.casts.steps
    if len(steps):
        columns = packing.columns_of(steps)
        data |= {"edges": columns.edges.tolist(), "first": columns.first.tolist(), "last": columns.last.tolist()}
        data["samples_per_column"] = -(-len(steps) // len(columns.starts))
        for statistic in all_statistics(thresholds, series.modules):
            if sheets := packing.sheets(series, statistic, columns, layers):
                data["statistics"].append(asdict(statistic) | {"name": statistic.name, "sheets": sheets})
    data["findings"] = [_target(one, data) for one in findings]
    return data


def _target(one: Finding, data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Location of a finding on the page: a sheet's row, or the loss; None if the page does not show it."""
    target: dict[str, Any] = {"first": one.first_step, "last": one.last_step}
    path = next(iter(one.places), one.path)
    if path not in data["layers"]:
        return target | {"statistic": None} if not path or one.code in RUN_WIDE else None
    layer = data["layers"].index(path)
    order = {name: index for index, name in enumerate(STATISTIC_OF_CODE.get(one.code, ()))}
    for entry in sorted(data["statistics"], key=lambda entry: order.get(entry["name"], len(order))):
        sheets = [index for index, sheet in enumerate(entry["sheets"]) if layer in sheet["rows"]]
        matching = [index for index in sheets if entry["sheets"][index]["role"] == one.role]
        if sheets:
            return target | {"statistic": entry["name"], "sheet": (matching or sheets)[0], "layer": layer}
    return None


def _facts(facts: Mapping[str, Any]) -> str:
    """A layer's recipe and shape as text."""
    if not facts:
        return ""
    window = f", history of {facts['history_length']}" if "history_length" in facts else ""
    return f"{facts['recipe']}{window}, {facts['in_features']:,} → {facts['out_features']:,}"


def _cast_paths(series: Series) -> list[str]:
    return list(dict.fromkeys(key.path for key in series.casts.keys))


def _scope(series: Series) -> str:
    steps, layers = series.casts.steps, _cast_paths(series)
    if not len(steps):
        return "No layer was sampled."
    recipes = sorted({str(series.layers[path]["recipe"]) for path in layers if path in series.layers})
    named = f" ({', '.join(recipes)})" if recipes else ""
    when = f"from step {int(steps[0]):,} to {int(steps[-1]):,}"
    return f"FP8 layers{named}: {len(layers):,}, sampled {len(steps):,} times {when}."


def _has_loss(series: Series) -> bool:
    return bool(len(series.curve("loss")[0]) or len(series.curve("nats")[0]))

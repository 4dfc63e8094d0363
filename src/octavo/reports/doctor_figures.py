"""Figures of a run's loss and of its gap to a reference run's."""

import math
from typing import Any

import numpy as np

from octavo.curves import Curve, difference, smoothed, thinned
from octavo.doctor.series import Series
from octavo.reports.figures import MUTED, add_level, add_line, add_points, new_figure

__all__ = ["COLOURS", "add_loss", "gap_figure", "loss_figure"]

COLOURS = {"run": "var(--series-1)", "reference": MUTED}
MOST_POINTS = 2000
SMOOTHING_SHARE = 100  # span of the smoothing, as a share of the run
MARKED = {"failure": "broke", "precision": "precision", "autopilot": "autopilot"}  # labels by kind of event
MOST_MARKS = 12


def loss_figure(series: Series, reference: Series | None) -> Any:
    """Training and validation loss over steps, the reference's below the run's."""
    figure = new_figure("nats a token")
    for name, one in (("reference", reference), ("run", series)):
        if one is not None:
            add_loss(figure, name, one, COLOURS[name])
    for event in [one for one in series.events if one["kind"] in MARKED][:MOST_MARKS]:
        add_level(figure, event["step"], MARKED[event["kind"]], axis="x", position="top left")
    return figure


def gap_figure(series: Series, reference: Series) -> Any:
    """The run's loss minus the reference's at the same steps; above zero the run is worse."""
    figure = new_figure("gap, nats")
    raw = difference(_curve(series, "loss"), _curve(reference, "loss"))
    gap = smoothed(raw, _span(raw))
    add_line(figure, thinned(raw, MOST_POINTS), "gap", COLOURS["run"], width=1, opacity=0.25)
    add_line(figure, thinned(gap, MOST_POINTS), "gap, smoothed", COLOURS["run"], width=2.2, opacity=1)
    held_out = difference(_curve(series, "nats"), _curve(reference, "nats"))
    add_points(figure, held_out, "gap on validation text", COLOURS["run"])
    figure.update_yaxes(zeroline=True, zerolinecolor=MUTED, zerolinewidth=1)
    return figure


def add_loss(figure: Any, name: str, series: Series, colour: str) -> None:
    """Add a run's training loss, faint and smoothed, and its validation loss."""
    raw = _curve(series, "loss")
    add_line(figure, thinned(raw, MOST_POINTS), name, colour, width=1, opacity=0.25)
    add_line(figure, thinned(smoothed(raw, _span(raw)), MOST_POINTS), f"{name}, smoothed", colour, width=2.2, opacity=1)
    add_points(figure, _curve(series, "nats"), f"{name}, validation", colour)


def _span(curve: Curve) -> float:
    return max(1.0, len(curve) / SMOOTHING_SHARE)


def _curve(series: Series, name: str) -> Curve:
    steps, values = series.curve(name)
    whole = zip(steps.astype(np.int64).tolist(), values.tolist(), strict=True)
    return tuple((step, value) for step, value in whole if math.isfinite(value))

"""The page of ``octavo agree``: tokens and their floor, layers, the distribution of |Δ log p|, and what explains it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from octavo.engines import Agreement, Attribution, Suspects
from octavo.engines.summary import (
    EFFECT_COLUMNS,
    LAYER_COLUMNS,
    TOKEN_COLUMNS,
    effect_cells,
    headline,
    layer_cells,
    notes,
    path_in_words,
    suspect_in_words,
    suspect_notes,
    token_rows,
    worst_first,
)
from octavo.engines.token_scores import TokenScores
from octavo.reports.figures import PALETTE, new_figure, plain
from octavo.reports.rendering import check_report_extra, render

__all__ = ["agreement_page"]

SAME, OWN = ("on the trainer's inputs", PALETTE["blue"]), ("on its own inputs", PALETTE["orange"])
SERVER, FLOOR = ("server against trainer", PALETTE["blue"]), ("floor", PALETTE["slate"])
QUANTILES = 200  # points of a distribution


def agreement_page(
    agreement: Agreement,
    facts: Mapping[str, Any],
    attribution: Attribution | None = None,
    suspects: Suspects | None = None,
) -> str:
    """HTML of an agreement.

    Args:
        agreement: result of ``octavo.agree``.
        facts: the model and the text, by name.
        attribution: to properties, if it was asked for.
        suspects: of a real server, if its log-probabilities were given.

    Raises:
        ConfigError: plotly or jinja2 is not installed.
    """
    check_report_extra("agree.html")
    names = {"trainer": agreement.trainer.engine, "server": agreement.server.engine}
    return render(
        "agreement",
        headline=headline(agreement),
        notes=list(notes(agreement)),
        token_columns=TOKEN_COLUMNS,
        tokens=token_rows(agreement),
        layers=_layers(agreement),
        layer_legend=[SAME, OWN],
        deltas=_deltas(agreement),
        delta_legend=[SERVER, FLOOR],
        columns=LAYER_COLUMNS,
        rows=[layer_cells(layer) for layer in worst_first(agreement)],
        effect_columns=EFFECT_COLUMNS,
        effects=[] if attribution is None else [effect_cells(effect) for effect in attribution.effects],
        interactions=None if attribution is None else f"{attribution.interactions:+.4g}",
        path=[] if attribution is None else [path_in_words(change) for change in attribution.path],
        suspects=[] if suspects is None else [suspect_in_words(each) for each in suspects.ranked],
        suspect_notes=[] if suspects is None else list(suspect_notes(agreement, suspects)),
        facts={**names, **{name: value for name, value in facts.items() if not isinstance(value, dict)}},
    )


def _layers(agreement: Agreement) -> Any:
    figure = new_figure("relative error of the output", x="layer")
    names = [plain(layer.path) for layer in agreement.layers]
    same = [layer.error.estimate for layer in agreement.layers]
    own = [layer.mean_end_to_end for layer in agreement.layers]
    for (label, colour), values in ((SAME, same), (OWN, own)):
        marker = {"color": colour, "size": 5}
        figure.add_scatter(
            x=list(range(1, len(names) + 1)),
            y=values,
            text=names,
            name=label,
            mode="markers",
            marker=marker,
            hovertemplate=f"%{{text}}<br>{label}: %{{y:.3g}}<extra></extra>",
        )
    figure.update_layout(hovermode="closest")
    return figure


def _deltas(agreement: Agreement) -> Any:
    """Share of tokens whose |Δ log p| is larger, over |Δ log p|."""
    figure = new_figure("share of tokens above", x="|Δ log p|, nats")
    for (label, colour), windows in ((SERVER, agreement.scores), (FLOOR, agreement.floor)):
        values, shares = _above(windows)
        figure.add_scatter(x=values, y=shares, name=label, mode="lines", line={"color": colour, "width": 2})
    figure.update_yaxes(type="log", dtick=1)
    return figure


def _above(windows: Sequence[TokenScores]) -> tuple[list[float], list[float]]:
    values, counts = torch.cat([scores.delta.abs() for scores in windows]).unique(return_counts=True)
    above = 1 - counts.cumsum(0) / counts.sum()
    places = torch.linspace(0, len(values) - 1, min(QUANTILES, len(values))).round().long()
    return values[places].tolist(), above[places].tolist()

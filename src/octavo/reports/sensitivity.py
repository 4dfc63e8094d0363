"""The sensitivity study's page: the chosen mix, other mixes by size, the cost of each layer, and all numbers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from octavo.quantization.sensitivity.study import MixResult, Sensitivity
from octavo.quantization.sensitivity.summary import asked, cost_of, headline, name_of, notes, worst_first
from octavo.quantization.sensitivity.units import BF16, CHOICES, WEIGHT_ONLY, Unit, recipe_of
from octavo.reports.figures import GRID, INK, PALETTE, add_level, new_figure, plain
from octavo.reports.rendering import check_report_extra, render

__all__ = ["sensitivity_page"]

CHOICE_COLOURS = {
    choice: PALETTE[name] for choice, name in zip(CHOICES, ("orange", "pink", "violet", "teal", "silver"), strict=True)
}
ROLE_COLOURS = [
    PALETTE[name] for name in ("blue", "teal", "amber", "pink", "lime", "orange", "cyan", "violet", "slate")
]
FRONT = ("least loss for its bytes", PALETTE["blue"])


def sensitivity_page(study: Sensitivity, facts: Mapping[str, str]) -> str:
    """HTML of a sensitivity study.

    Args:
        study: its mixes and the costs of layers.
        facts: the model and the text, by name.

    Raises:
        ConfigError: plotly or jinja2 is not installed.
    """
    check_report_extra("report.html")
    best = study.best
    shown = [choice for choice in ("tensorwise", WEIGHT_ONLY) if any(choice in unit.choices for unit in study.units)]
    return render(
        "sensitivity",
        headline=headline(study),
        budget=asked(study.budget),
        notes=list(notes(study)),
        front=_front(study),
        front_legend=[
            *([] if best is None else [("the mix", INK)]),
            FRONT,
            *((name_of(one), CHOICE_COLOURS[one.name]) for one in study.presets),
        ],
        costs=[(choice, _bars(study, choice)) for choice in shown],
        role_legend=list(_role_colours(study).items()),
        mix=None if best is None else _map(study, best),
        mix_height=90 + 34 * len(_role_colours(study)),
        mix_legend=list(CHOICE_COLOURS.items()),
        columns=["layer", *CHOICES[:-1], "the mix", "run alone: KL beyond the floor"],
        rows=[(unit.path, *_cells(study, unit)) for unit in worst_first(study)],
        facts=facts,
    )


def _front(study: Sensitivity) -> Any:
    figure = new_figure("perplexity above BF16, %", x="bytes over BF16's")
    _add_mixes(figure, study.front, *FRONT, mode="lines+markers", size=9)
    for one in study.presets:
        _add_mixes(figure, [one], name_of(one), CHOICE_COLOURS[one.name], size=11)
    if study.best is not None:
        _add_mixes(figure, [study.best], "the mix", INK, size=15, symbol="star")
    if study.budget.perplexity is not None:
        add_level(figure, 100 * study.budget.perplexity, "asked for")
    if study.budget.bytes_share is not None:
        add_level(figure, study.budget.bytes_share, "asked for", axis="x")
    figure.update_layout(hovermode="closest")
    figure.update_xaxes(rangemode="normal")
    return figure


def _add_mixes(
    figure: Any,
    mixes: Sequence[MixResult],
    name: str,
    colour: str,
    *,
    size: int,
    mode: str = "markers",
    symbol: str = "circle",
) -> None:
    verified = [(one, one.verified) for one in mixes if one.verified is not None]
    figure.add_scatter(
        x=[one.bytes_share for one, _ in verified],
        y=[100 * true.perplexity_increase for _, true in verified],
        error_y={"array": [100 * true.error for _, true in verified], "color": colour, "thickness": 1, "width": 3},
        customdata=[[one.fp8_products, true.divergence] for one, true in verified],
        hovertemplate=f"{name}<br>%{{x:.3f}} of the bytes, %{{y:+.2f}} %<br>"
        "%{customdata[0]:.0%} of the products in FP8<br>KL %{customdata[1]:.4f} nats<extra></extra>",
        mode=mode,
        marker={"color": colour, "size": size, "symbol": symbol},
        line={"color": colour, "width": 2},
    )


def _role_colours(study: Sensitivity) -> dict[str, str]:
    roles = dict.fromkeys(unit.role for unit in study.units)
    return {role: ROLE_COLOURS[index % len(ROLE_COLOURS)] for index, role in enumerate(roles)}


def _place(unit: Unit) -> str:
    """Short label of a unit's position in the model, so that the labels of many blocks fit."""
    if unit.depth is not None:
        return str(unit.depth)
    return "table" if unit.is_table else "head" if unit.is_head else plain(unit.role)


def _bars(study: Sensitivity, choice: str) -> Any:
    figure = new_figure("thousandths of a nat", x="block")
    for role, colour in _role_colours(study).items():
        costs = [(unit, cost_of(study, unit, choice)) for unit in study.units if unit.role == role]
        known = [(_place(unit), 1000 * nats) for unit, nats in costs if nats is not None]
        x, y = [place for place, _ in known], [cost for _, cost in known]
        figure.add_bar(x=x, y=y, name=plain(role), marker={"color": colour}, hovertemplate="%{y:.3f}")
    figure.update_layout(barmode="stack", bargap=0.15)
    places = list(dict.fromkeys(map(_place, study.units)))
    figure.update_xaxes(type="category", categoryorder="array", categoryarray=places)
    return figure


def _map(study: Sensitivity, best: MixResult) -> Any:
    figure = new_figure("", x="block")
    places, roles = list(dict.fromkeys(map(_place, study.units))), list(_role_colours(study))
    chosen = {(unit.role, _place(unit)): best.chosen[unit.path] for unit in study.units}
    rows = [[chosen.get((role, place)) for place in places] for role in roles]
    figure.add_heatmap(
        x=places,
        y=list(map(plain, roles)),
        z=[[None if choice is None else CHOICES.index(recipe_of(choice)) for choice in row] for row in rows],
        text=[[choice or "" for choice in row] for row in rows],
        zmin=-0.5,
        zmax=len(CHOICES) - 0.5,
        colorscale=_steps(list(CHOICE_COLOURS.values())),
        showscale=False,
        xgap=2,
        ygap=2,
        hoverongaps=False,
        hovertemplate="block %{x}, %{y}: %{text}<extra></extra>",
    )
    figure.update_layout(hovermode="closest")
    figure.update_xaxes(type="category", gridcolor="rgba(0,0,0,0)")
    figure.update_yaxes(autorange="reversed", type="category", gridcolor=GRID)
    return figure


def _steps(colours: Sequence[str]) -> list[tuple[float, str]]:
    """A colour scale of steps, without transitions."""
    count = len(colours)
    return [(edge / count, colour) for index, colour in enumerate(colours) for edge in (index, index + 1)]


def _cells(study: Sensitivity, unit: Unit) -> Iterator[str]:
    for choice in CHOICES[:-1]:
        nats = cost_of(study, unit, choice)
        yield "–" if nats is None else f"{1000 * nats:.3f}"
    yield "–" if study.best is None else study.best.chosen.get(unit.path, BF16)
    runs = ((choice, study.measured.get((unit.path, choice))) for choice in unit.choices)
    floor = study.floor.divergence
    alone = [f"{choice} {1000 * (true.divergence - floor):.3f}" for choice, true in runs if true is not None]
    yield ", ".join(alone) or "–"

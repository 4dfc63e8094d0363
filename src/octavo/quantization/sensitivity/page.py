"""``report.html``: what each layer costs, and bytes against perplexity, as one page that opens anywhere, offline.

It answers in this order: what came out (headline), what smaller and larger mixes cost (front), which layers cost it
(bars by depth and role), what each layer became (map), and every number (table).
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from octavo.pages import GRID, INK, MUTED, figure_html, legend, plotly_script, step_figure
from octavo.quantization.sensitivity.page_style import PAGE
from octavo.quantization.sensitivity.study import Found, Sensitivity
from octavo.quantization.sensitivity.telling import asked, cost_of, headline, name_of, notes, worst_first
from octavo.quantization.sensitivity.units import BF16, CHOICES, WEIGHT_ONLY, Unit, recipe_of

__all__ = ["render"]

CHOICE_COLOURS = dict(zip(CHOICES, ("#d9480f", "#be185d", "#7c3aed", "#0f766e", "#94a3b8"), strict=True))
ROLE_COLOURS = ("#2563eb", "#0891b2", "#0f766e", "#65a30d", "#ca8a04", "#d9480f", "#be185d", "#7c3aed", "#4b5563")


def render(found: Sensitivity, facts: Mapping[str, str]) -> str:
    """The page's HTML.

    Args:
        found: what to show.
        facts: the model and the text, by name.

    Raises:
        ConfigError: plotly is not installed.
    """
    shown = [choice for choice in ("tensorwise", WEIGHT_ONLY) if any(choice in unit.choices for unit in found.units)]
    return PAGE.substitute(
        script=plotly_script("report.html"),
        headline=escape(headline(found)),
        standfirst=escape(f"Asked for: {asked(found.budget)}."),
        notes="".join(f"<p>{escape(line)}</p>" for line in notes(found)),
        front=figure_html(_front(found)),
        front_legend=legend(_front_names(found)),
        bars="".join(
            f"<h3>{choice}</h3><div class='plot'>{figure_html(_bars(found, choice))}</div>" for choice in shown
        ),
        role_legend=legend(_role_colours(found).items()),
        map="<p>There is no mix to show.</p>"
        if found.best is None
        else f"<div class='plot' style='height:{_map_height(found)}px'>{figure_html(_map(found, found.best))}</div>",
        map_legend=legend(CHOICE_COLOURS.items()),
        table=_table(found),
        facts="".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items()),
    )


def _front_names(found: Sensitivity) -> list[tuple[str, str]]:
    names = [] if found.best is None else [("the mix", INK)]
    names.append(("least loss for its bytes", "#2563eb"))
    return names + [(one.name, CHOICE_COLOURS[one.name]) for one in found.presets]


def _front(found: Sensitivity) -> Any:
    figure = step_figure("perplexity above BF16, %")
    _points(figure, found.front, "least loss for its bytes", "#2563eb", mode="lines+markers", size=9)
    for one in found.presets:
        _points(figure, [one], name_of(one), CHOICE_COLOURS[one.name], mode="markers", size=11)
    if found.best is not None:
        _points(figure, [found.best], "the mix", INK, mode="markers", size=15, symbol="star")
    if found.budget.perplexity is not None:
        _limit(figure.add_hline, "y", 100 * found.budget.perplexity)
    if found.budget.bytes_share is not None:
        _limit(figure.add_vline, "x", found.budget.bytes_share)
    figure.update_layout(hovermode="closest")
    figure.update_xaxes(title="bytes over BF16's", rangemode="normal")
    return figure


def _limit(add: Any, axis: str, value: float) -> None:
    text = {"text": "asked for", "font": {"size": 11.5, "color": MUTED}}
    add(**{axis: value}, line={"color": MUTED, "dash": "dot", "width": 1.2}, annotation=text)


def _points(
    figure: Any, some: Sequence[Found], name: str, colour: str, *, mode: str, size: int, symbol: str = "circle"
) -> None:
    known = [(one, one.verified) for one in some if one.verified is not None]
    figure.add_scatter(
        x=[one.bytes_share for one, _ in known],
        y=[100 * true.perplexity_increase for _, true in known],
        error_y={"array": [100 * true.error for _, true in known], "color": colour, "thickness": 1, "width": 3},
        customdata=[[one.fp8_products, true.divergence] for one, true in known],
        hovertemplate=f"{name}<br>%{{x:.3f}} of the bytes, %{{y:+.2f}} %<br>"
        "%{customdata[0]:.0%} of the products in FP8<br>KL %{customdata[1]:.4f} nats<extra></extra>",
        mode=mode,
        marker={"color": colour, "size": size, "symbol": symbol},
        line={"color": colour, "width": 2},
    )


def _role_colours(found: Sensitivity) -> dict[str, str]:
    roles = dict.fromkeys(unit.role for unit in found.units)
    return {role: ROLE_COLOURS[index % len(ROLE_COLOURS)] for index, role in enumerate(roles)}


def _place(unit: Unit) -> str:
    """Where a unit stands along the model; short, so that the labels of many blocks fit."""
    if unit.depth is not None:
        return str(unit.depth)
    return "table" if unit.is_table else "head" if unit.is_head else unit.role


def _bars(found: Sensitivity, choice: str) -> Any:
    figure = step_figure("thousandths of a nat")
    places = list(dict.fromkeys(map(_place, found.units)))
    for role, colour in _role_colours(found).items():
        units = [unit for unit in found.units if unit.role == role and cost_of(found, unit, choice) is not None]
        figure.add_bar(
            x=[_place(unit) for unit in units],
            y=[1000 * (cost_of(found, unit, choice) or 0.0) for unit in units],
            name=role,
            marker={"color": colour},
            hovertemplate="%{y:.3f}",
        )
    figure.update_layout(barmode="stack", bargap=0.15)
    figure.update_xaxes(title="block", type="category", categoryorder="array", categoryarray=places)
    return figure


def _map_height(found: Sensitivity) -> int:
    return 90 + 34 * len(dict.fromkeys(unit.role for unit in found.units))


def _map(found: Sensitivity, best: Found) -> Any:
    figure = step_figure("")
    places, roles = list(dict.fromkeys(map(_place, found.units))), list(dict.fromkeys(u.role for u in found.units))
    chosen = {(unit.role, _place(unit)): best.chosen[unit.path] for unit in found.units}
    rows = [[chosen.get((role, place)) for place in places] for role in roles]
    codes = [[None if choice is None else CHOICES.index(recipe_of(choice)) for choice in row] for row in rows]
    figure.add_heatmap(
        x=places,
        y=roles,
        z=codes,
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
    figure.update_xaxes(title="block", type="category", gridcolor="rgba(0,0,0,0)")
    figure.update_yaxes(autorange="reversed", type="category", gridcolor=GRID)
    return figure


def _steps(colours: Sequence[str]) -> list[tuple[float, str]]:
    """A colour scale without passages."""
    count = len(colours)
    return [(edge / count, colour) for index, colour in enumerate(colours) for edge in (index, index + 1)]


def _table(found: Sensitivity) -> str:
    head = ["layer", *CHOICES[:-1], "the mix", "run alone: KL beyond the floor"]
    lines = ["<table><thead><tr>", *(f"<th>{escape(name)}</th>" for name in head), "</tr></thead><tbody>"]
    for unit in worst_first(found):
        cells = "".join(f"<td>{cell}</td>" for cell in _cells(found, unit))
        lines.append(f'<tr><th scope="row">{escape(unit.path)}</th>{cells}</tr>')
    return "".join([*lines, "</tbody></table>"])


def _cells(found: Sensitivity, unit: Unit) -> Iterator[str]:
    for choice in CHOICES[:-1]:
        nats = cost_of(found, unit, choice)
        yield "–" if nats is None else f"{1000 * nats:.3f}"
    yield "–" if found.best is None else escape(found.best.chosen.get(unit.path, BF16))
    runs = ((choice, found.measured.get((unit.path, choice))) for choice in unit.choices)
    floor = found.floor.divergence
    alone = [f"{choice} {1000 * (true.divergence - floor):.3f}" for choice, true in runs if true is not None]
    yield escape(", ".join(alone) or "–")

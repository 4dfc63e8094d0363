"""The page of a study over several seeds: gaps with intervals, gaps over the steps, claims, pairs, costs."""

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.curves import difference
from octavo.experiments import grid_tables
from octavo.experiments.claims import VERDICTS, Outcome, outcomes
from octavo.experiments.grid_comparison import GridComparison, VariantMeasures
from octavo.experiments.presets import Preset
from octavo.html.wording import counted
from octavo.reports.figures import MUTED, PALETTE, add_level, add_line, new_figure
from octavo.reports.rendering import check_report_extra, render

__all__ = ["grid_page"]

COLOURS = [PALETTE[name] for name in ("orange", "violet", "teal", "pink", "blue", "slate")]


def grid_page(comparison: GridComparison, preset: Preset | None, facts: Mapping[str, str]) -> str:
    """HTML of a grid.

    Args:
        comparison: its runs.
        preset: whose claims were tested.
        facts: machine, model and text, by name.

    Raises:
        ConfigError: plotly or jinja2 is not installed.
    """
    check_report_extra("report.html")
    measures = [comparison.measures(group) for group in comparison.groups]
    compared = [one for one in measures if one.gap is not None]
    found = outcomes([(claim, comparison) for claim in preset.claims]) if preset else []
    return render(
        "grid",
        headline=_claims_headline(found) if found else _headline(comparison, measures),
        bars=comparison.bars,
        baseline=comparison.baseline,
        intervals=_intervals(comparison, compared),
        curves=_curves(comparison),
        curve_legend=list(zip(_names_at(comparison), COLOURS * len(compared), strict=False)),
        claim_columns=grid_tables.CLAIM_COLUMNS,
        claims=grid_tables.claim_rows(found),
        gap_columns=grid_tables.GAP_COLUMNS,
        gaps=grid_tables.gap_rows(comparison, measures),
        ranking_columns=grid_tables.RANKING_COLUMNS,
        ranking=grid_tables.ranking_rows(comparison.ranking(*comparison.factors)),
        at=grid_tables.at(comparison.factors),
        cost_columns=grid_tables.cost_columns(comparison.bars.targets),
        costs=grid_tables.cost_rows(measures),
        facts=facts,
        notes=grid_tables.notes(comparison, measures),
    )


def _claims_headline(outcomes: Sequence[Outcome]) -> str:
    """Counts of verdicts: a preset's variants may be models that differ in more than precision."""
    verdicts = [one.verdict for one in outcomes]
    counts = (f"{verdicts.count(name)} {name}" for name in VERDICTS if name in verdicts)
    return f"{counted(len(verdicts), 'claim')} rerun: {', '.join(counts)}"


def _headline(comparison: GridComparison, measures: list[VariantMeasures]) -> str:
    others = [one for one in measures if one.group[0] != comparison.baseline]
    if max(one.seeds for one in measures) == 1:
        return "One seed: gaps without intervals, and no verdict"
    within = [one for one in others if comparison.is_within(one)]
    return (
        f"{len(within)} of {len(others)} variants end within {comparison.bars.gap_nats:g} nats of "
        f"{comparison.baseline}, by the upper end of their 95 % intervals"
    )


def _intervals(comparison: GridComparison, compared: list[VariantMeasures]) -> Any:
    """Each variant's gap as a point with its interval."""
    figure = new_figure("variant", x="gap, nats a token")
    names = [name for name, *_ in grid_tables.gap_rows(comparison, compared)]
    gaps = [one.gap for one in compared if one.gap is not None]
    figure.add_scatter(
        x=[gap.estimate for gap in gaps],
        y=names,
        mode="markers",
        marker={"color": PALETTE["orange"], "size": 9},
        error_x={"type": "data", "array": [gap.half_width for gap in gaps], "color": PALETTE["orange"]},
    )
    add_level(figure, comparison.bars.gap_nats, "bar", axis="x")
    figure.update_xaxes(zeroline=True, zerolinecolor=MUTED, zerolinewidth=1)
    figure.update_yaxes(autorange="reversed", title=None)
    return figure


def _names_at(comparison: GridComparison) -> list[str]:
    """Variants at the comparison's factors, without the baseline."""
    every = [name for name, *factors in comparison.groups if tuple(factors) == comparison.factors]
    return [name for name in every if name != comparison.baseline]


def _curves(comparison: GridComparison) -> Any:
    """Validation gaps of every seed over the steps."""
    figure = new_figure("gap, nats a token")
    factors = comparison.factors
    base = comparison.groups[comparison.baseline, *factors]
    for name, colour in zip(_names_at(comparison), COLOURS * len(comparison.groups), strict=False):
        runs = comparison.groups[name, *factors]
        for seed in sorted(runs.keys() & base.keys()):
            curve = difference(runs[seed].run.validation_curve, base[seed].run.validation_curve)
            add_line(figure, curve, f"{name}, seed {seed}", colour, width=1.5)
    add_level(figure, comparison.bars.gap_nats, f"bar: +{comparison.bars.gap_nats:g}", position="top left")
    figure.update_yaxes(zeroline=True, zerolinecolor=MUTED, zerolinewidth=1)
    return figure

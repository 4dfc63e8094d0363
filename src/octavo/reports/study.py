"""The study's page: the cost of FP8, curves and gaps of the runs, all measures, the setting, and sampled text."""

from collections.abc import Sequence
from typing import Any

from octavo.curves import difference, perplexity_text, smoothed
from octavo.reports.figures import MUTED, PALETTE, add_level, add_line, add_points, new_figure
from octavo.reports.rendering import check_report_extra, render
from octavo.training import study_table
from octavo.training.comparison import GAP_BAR_NATS, RunMeasures, Study
from octavo.training.study_table import title_of

__all__ = ["study_page"]

COLOURS = {"fp32": PALETTE["slate"], "bf16": PALETTE["blue"]}
FP8_COLOURS = [PALETTE[name] for name in ("orange", "violet", "teal", "pink")]
SMOOTHING_SHARE = 25  # span of the smoothing, as a share of the run

Pair = tuple[RunMeasures, RunMeasures, str]  # a run, the run it is compared with, the colour of the gap


def study_page(study: Study, *, device: str = "cpu") -> str:
    """HTML of a study.

    Args:
        study: its runs and their measures.
        device: "cpu" or "cuda": device of the runs, on which the meaning of tokens/s and peak memory depends.

    Raises:
        ConfigError: plotly or jinja2 is not installed.
    """
    check_report_extra("report.html")
    colours, pairs = _colours(study), _pairs(study)
    notes = (study_table.threads_note(study, device), study_table.emulation_note(device))
    table_notes = (study_table.yardstick(study), study_table.target_note(study), study_table.ARTICLE_NOTE)
    return render(
        "study",
        headline=study_table.verdict(study),
        standfirst=_standfirst(study),
        runs=[
            {"name": title_of(run.recipe), "colour": colours[run.recipe], "perplexity": perplexity_text(run.nats)}
            | {"nats": run.nats}
            for run in study.runs
        ],
        loss_legend=[(title_of(run.recipe), colours[run.recipe]) for run in study.runs],
        loss=_loss_figure(study),
        gap_legend=[(_gap_name(run, base), colour) for run, base, colour in pairs],
        gap=_gap_figure(study, pairs),
        gap_bar=GAP_BAR_NATS,
        table_note=" ".join(filter(None, table_notes)),
        columns=study_table.columns(study),
        rows=[(row.name, *row.cells, row.difference, row.article) for row in study_table.rows(study, device)],
        speed_note=" ".join(filter(None, notes)),
        facts=study.facts,
        prompt=study.prompt,
        samples=[(title_of(recipe), text) for recipe, text in study.samples.items()],
    )


def _colours(study: Study) -> dict[str, str]:
    fp8 = (run.recipe for run in study.fp8_runs)
    return COLOURS | dict(zip(fp8, FP8_COLOURS * len(study.runs), strict=False))


def _span(study: Study) -> float:
    return max(1.0, study.baseline.steps / SMOOTHING_SHARE)


def _loss_figure(study: Study) -> Any:
    figure, colours = new_figure("nats a token"), _colours(study)
    for above, run in zip(reversed(range(len(study.runs))), study.runs, strict=True):
        name, colour = title_of(run.recipe), colours[run.recipe]
        # The curves nearly coincide: the lower ones are drawn wider, so that every colour shows.
        add_line(figure, smoothed(run.train_curve, _span(study)), f"{name} training", colour, width=1.5 + 1.5 * above)
        add_points(figure, run.validation_curve, f"{name} validation", colour, width=2 + 2 * above)
    add_level(figure, study.unigram_nats, "unigram entropy")
    add_level(
        figure, study.target_nats, "target", position="bottom left"
    )  # the curves come down from above to the right
    return figure


def _gap_figure(study: Study, pairs: Sequence[Pair]) -> Any:
    figure = new_figure("difference, nats a token")
    figure.add_hrect(y0=-GAP_BAR_NATS, y1=GAP_BAR_NATS, fillcolor="var(--met)", opacity=0.1, line_width=0)
    add_level(figure, GAP_BAR_NATS, f"bar: +{GAP_BAR_NATS:.4f}", position="top left")
    extent = 2.0 * GAP_BAR_NATS
    for run, base, colour in pairs:
        name = _gap_name(run, base)
        training = smoothed(difference(run.train_curve, base.train_curve), _span(study))
        validation = difference(run.validation_curve, base.validation_curve)
        add_line(figure, training, f"{name}, training", colour, width=1.5)
        add_points(figure, validation, name, colour)
        settled = (gap for step, gap in validation if step >= study.baseline.steps / 5)
        extent = max([extent, *(1.3 * abs(gap) for gap in settled)])
    figure.update_yaxes(range=[-extent, extent], zeroline=True, zerolinecolor=MUTED, zerolinewidth=1)
    return figure


def _pairs(study: Study) -> list[Pair]:
    """FP8 against BF16 in the FP8 run's colour, FP8 against FP32 in grey, BF16 against FP32 in blue."""
    colours, by_recipe = _colours(study), {run.recipe: run for run in study.runs}
    gaps = [
        (run.recipe, base, colours[run.recipe if base == "bf16" else base])
        for run in study.fp8_runs
        for base in ("bf16", "fp32")
    ]
    gaps.append(("bf16", "fp32", colours["bf16"]))
    return [(by_recipe[one], by_recipe[base], colour) for one, base, colour in gaps if {one, base} <= by_recipe.keys()]


def _gap_name(run: RunMeasures, base: RunMeasures) -> str:
    return f"{title_of(run.recipe)} − {title_of(base.recipe)}"


def _standfirst(study: Study) -> str:
    names = ", ".join(title_of(run.recipe) for run in study.runs)
    model = study.facts.get("model", "one model")
    return (
        f"{names}: {model}, trained {study.baseline.steps:,} steps each from the same initial weights on the same "
        "batches, and evaluated on text that none of them was trained on."
    )

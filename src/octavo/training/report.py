"""``report.html``: a study as one page that opens anywhere, offline.

The page answers in this order: what FP8 cost (headline), how the runs went (loss), where they parted (gap), the table,
what the figures hang on (facts), and what the models write.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from octavo.curves import difference, perplexity_text, smoothed
from octavo.pages import MUTED, figure_html, legend, level, line, plotly_script, points, step_figure
from octavo.training import study_table
from octavo.training.comparison import GAP_BAR_NATS, RunMeasures, Study
from octavo.training.report_style import PAGE

__all__ = ["render"]

COLOURS = {"fp32": "#64748b", "bf16": "#2563eb"}
FP8_COLOURS = ("#d9480f", "#7c3aed", "#0f766e", "#be185d")
SMOOTHING_SHARE = 25  # the smoothing's span is this part of the run


def render(study: Study, *, device: str = "cpu") -> str:
    """The page's HTML.

    Args:
        study: what to show.
        device: "cpu" or "cuda": where the runs were, which decides what tokens/s and peak memory mean.

    Raises:
        ConfigError: plotly is not installed.
    """
    return PAGE.substitute(
        script=plotly_script("report.html"),
        headline=escape(study_table.verdict(study)),
        standfirst=escape(_standfirst(study)),
        cards=_cards(study),
        loss_legend=legend((study_table.title_of(run.recipe), _colours(study)[run.recipe]) for run in study.runs),
        loss_figure=figure_html(_loss_figure(study)),
        gap_legend=legend((_gap_name(run, base), colour) for run, base, colour in _pairs(study)),
        gap_figure=figure_html(_gap_figure(study)) if len(study.runs) > 1 else "<p>One run has no gap.</p>",
        gap_bar=f"{GAP_BAR_NATS:.4f}",
        table=_table(study, device),
        yardstick=escape(study_table.yardstick(study) or ""),
        target_note=escape(study_table.target_note(study)),
        emulation_note=escape(_speed_note(study, device)),
        facts=_facts(study.facts),
        samples=_samples(study),
    )


def _speed_note(study: Study, device: str) -> str:
    notes = (study_table.threads_note(study, device), study_table.emulation_note(device))
    return " ".join(filter(None, notes))


def _colours(study: Study) -> dict[str, str]:
    fp8 = (run.recipe for run in study.fp8_runs)
    return COLOURS | dict(zip(fp8, FP8_COLOURS * len(study.runs), strict=False))


def _span(study: Study) -> float:
    return max(1.0, study.baseline.steps / SMOOTHING_SHARE)


def _loss_figure(study: Study) -> Any:
    figure = step_figure("nats a token")
    for above, run in zip(reversed(range(len(study.runs))), study.runs, strict=True):
        name, colour = study_table.title_of(run.recipe), _colours(study)[run.recipe]
        # The curves nearly coincide: what lies below is drawn wider, so that every colour shows.
        line(figure, smoothed(run.train_curve, _span(study)), f"{name} training", colour, width=1.5 + 1.5 * above)
        points(figure, run.validation_curve, f"{name} validation", colour, width=2 + 2 * above)
    level(figure, study.unigram_nats, "unigram entropy: what token counts alone reach")
    level(figure, study.target_nats, "target", position="bottom left")  # the curves come down from above to the right
    return figure


def _gap_figure(study: Study) -> Any:
    figure = step_figure("difference, nats a token")
    figure.add_hrect(y0=-GAP_BAR_NATS, y1=GAP_BAR_NATS, fillcolor="#16a34a", opacity=0.08, line_width=0)
    level(figure, GAP_BAR_NATS, f"bar: +{GAP_BAR_NATS:.4f}")
    extent = 2.0 * GAP_BAR_NATS
    for run, base, colour in _pairs(study):
        name = _gap_name(run, base)
        training = smoothed(difference(run.train_curve, base.train_curve), _span(study))
        validation = difference(run.validation_curve, base.validation_curve)
        line(figure, training, f"{name}, training", colour, width=1.5)
        points(figure, validation, name, colour)
        settled = (gap for step, gap in validation if step >= study.baseline.steps / 5)
        extent = max([extent, *(1.3 * abs(gap) for gap in settled)])
    figure.update_yaxes(range=[-extent, extent], zeroline=True, zerolinecolor=MUTED, zerolinewidth=1)
    return figure


def _pairs(study: Study) -> list[tuple[RunMeasures, RunMeasures, str]]:
    """FP8 against BF16 in the FP8 run's colour, FP8 against FP32 in grey, BF16 against FP32 in blue."""
    colours = _colours(study)
    by_recipe = {run.recipe: run for run in study.runs}
    pairs = []
    for run in study.fp8_runs:
        pairs += [(run, by_recipe[base], colour) for base, colour in _bases(run, colours) if base in by_recipe]
    if {"fp32", "bf16"} <= by_recipe.keys():
        pairs.append((by_recipe["bf16"], by_recipe["fp32"], colours["bf16"]))
    return pairs


def _gap_name(run: RunMeasures, base: RunMeasures) -> str:
    return f"{study_table.title_of(run.recipe)} − {study_table.title_of(base.recipe)}"


def _bases(run: RunMeasures, colours: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return (("bf16", colours[run.recipe]), ("fp32", colours["fp32"]))


def _standfirst(study: Study) -> str:
    names = ", ".join(study_table.title_of(run.recipe) for run in study.runs)
    model = study.facts.get("model", "one model")
    return (
        f"{names}: {model}, trained {study.baseline.steps:,} steps each from the same initial weights on the same "
        "batches, and read on text none of them has seen."
    )


def _cards(study: Study) -> str:
    colours = _colours(study)
    return "\n".join(
        f'<div class="card" style="--accent:{colours[run.recipe]}"><div class="name">'
        f"{escape(study_table.title_of(run.recipe))}</div>"
        f'<div class="figure">{perplexity_text(run.nats)}</div>'
        f'<div class="unit">held-out perplexity · {run.nats:.4f} nats</div></div>'
        for run in study.runs
    )


def _table(study: Study, device: str) -> str:
    head = study_table.columns(study)
    lines = ["<table><thead><tr>", *(f"<th>{escape(name)}</th>" for name in head), "</tr></thead><tbody>"]
    for row in study_table.rows(study, device):
        cells = [*row.cells, row.difference, row.article]
        lines += ["<tr>", f'<th scope="row">{escape(row.name)}</th>', *_labelled(head[1:], cells), "</tr>"]
    return "".join([*lines, "</tbody></table>"])


def _labelled(names: Sequence[str], cells: Sequence[str]) -> list[str]:
    return [f'<td data-label="{escape(name)}">{escape(cell)}</td>' for name, cell in zip(names, cells, strict=True)]


def _facts(facts: Mapping[str, str]) -> str:
    return "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())


def _samples(study: Study) -> str:
    return "".join(
        f"<figure><figcaption>{escape(study_table.title_of(recipe))}</figcaption><pre><b>{escape(study.prompt)}</b>"
        f"{escape(text)}</pre></figure>"
        for recipe, text in study.samples.items()
    )

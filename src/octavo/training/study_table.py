"""Table and verdict of a study as text, for the command and the report.

The rows are those of the article octavo started from (GPTs of 7 to 13 billion parameters on WikiText-103). Its figures
are a reference for the *differences*; their absolute values are those of another model and text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.curves import MOST_PLAIN, perplexity_text
from octavo.memory import MIB
from octavo.training.comparison import GAP_BAR_NATS, TARGET_FRACTION, Gap, RunMeasures, Study

__all__ = [
    "ARTICLE",
    "ARTICLE_NOTE",
    "Row",
    "columns",
    "emulation_note",
    "rows",
    "target_note",
    "threads_note",
    "title_of",
    "verdict",
    "yardstick",
]

NOTHING = "–"
ARTICLE = "“FP8 Training and Inference: Next-Generation Numerical Formats” (2025)"
ARTICLE_NOTE = (
    f"The last column is from the article {ARTICLE}, for GPTs of 7 to 13 billion parameters on WikiText-103: compare "
    "its differences, not its values."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measure: a cell per run, the FP8 run's difference to BF16, and the article's figures."""

    name: str
    cells: tuple[str, ...]
    difference: str
    article: str


def columns(study: Study) -> list[str]:
    """Column titles."""
    return ["", *(title_of(run.recipe) for run in study.runs), "FP8 vs BF16", "article: FP32/BF16/FP8"]


def title_of(recipe: str) -> str:
    """Title of a run in a table.

    Example:
        >>> title_of("bf16"), title_of("tensorwise")
        ('BF16', 'FP8 tensorwise')
    """
    return {"fp32": "FP32", "bf16": "BF16"}.get(recipe, f"FP8 {recipe}")


def rows(study: Study, device: str) -> list[Row]:
    """One row per measure; ``device`` is that of the runs, "cpu" or "cuda"."""
    return [
        _perplexity(study),
        _loss(study),
        _steps(study),
        _variance(study),
        _gradient_error(study),
        _throughput(study, device),
        _memory(study, device),
    ]


def target_note(study: Study) -> str:
    """Note on the target of the steps row."""
    steps = round(TARGET_FRACTION * study.baseline.steps)
    return (
        f"Target perplexity {perplexity_text(study.target_nats, 2)}: that of {title_of(study.baseline.recipe)} on "
        f"the validation text after {steps:,} of its {study.baseline.steps:,} steps."
    )


def emulation_note(device: str) -> str:
    """Note on the throughput and memory rows."""
    if device == "cuda":
        return "Tokens/s are this GPU's; peak memory is the largest that a run allocated on it."
    return (
        "On a CPU, FP8 is emulated: casts and GEMMs run as ordinary instructions, at their speed. "
        "Tokens/s here do not predict those on Hopper, where the article reports FP8 at 1.23 times BF16. "
        "Peak memory is that of the whole process and includes memory left by earlier runs."
    )


def threads_note(study: Study, device: str) -> str | None:
    """Reason why the throughput row has no ratios; None if it has."""
    if _is_timed_alike(study, device):
        return None
    threads = ", ".join(
        f"{title_of(run.recipe)} {' and '.join(map(str, run.threads)) or 'unknown'}" for run in study.runs
    )
    return f"Tokens/s are not compared, because the numbers of CPU threads differ ({threads})."


def verdict(study: Study) -> str:
    """Sentence with the cost of FP8 in this study."""
    pair = _fp8_and_bf16(study)
    if pair is None:
        return f"{len(study.runs)} run(s) on the same text and batches; no FP8 run to compare with BF16."
    fp8, bf16 = pair
    gap = study.gap(fp8.recipe, bf16.recipe)
    if gap.nats < 0:
        side, outcome = "below", ", so it stays under"
    else:
        side, outcome = "above", ": within" if gap.nats <= GAP_BAR_NATS else ": outside"
    return (
        f"{title_of(fp8.recipe)} ends {abs(gap.nats):.4f} ± {_error(gap)} nats {side} BF16 on held-out text "
        f"({_percent(gap)} perplexity){outcome} the bar of {GAP_BAR_NATS:.4f} nats, with one seed."
    )


def yardstick(study: Study) -> str | None:
    """Gap between BF16 and FP32, for scale; None without both runs."""
    if {"fp32", "bf16"} - {run.recipe for run in study.runs}:
        return None
    gap = study.gap("bf16", "fp32")
    return (
        f"For scale: BF16 ends {gap.nats:+.4f} ± {_error(gap)} nats from FP32. The ± covers the choice of "
        "held-out text, not that of the seed."
    )


def _fp8_and_bf16(study: Study) -> tuple[RunMeasures, RunMeasures] | None:
    names = [run.recipe for run in study.runs]
    return (study.fp8_runs[0], study.run("bf16")) if study.fp8_runs and "bf16" in names else None


def _gap(study: Study) -> Gap | None:
    pair = _fp8_and_bf16(study)
    return None if pair is None else study.gap(pair[0].recipe, pair[1].recipe)


def _perplexity(study: Study) -> Row:
    gap = _gap(study)
    return Row(
        name="Final perplexity",
        cells=tuple(perplexity_text(run.nats) for run in study.runs),
        difference=NOTHING if gap is None else _percent(gap),
        article="9.42/9.51/9.58 +0.74 %",
    )


def _loss(study: Study) -> Row:
    gap = _gap(study)
    return Row(
        name="Final loss, nats",
        cells=tuple(f"{run.nats:.4f}" for run in study.runs),
        difference=NOTHING if gap is None else f"{gap.nats:+.4f} ± {_error(gap)}",
        article="+0.0073",
    )


def _steps(study: Study) -> Row:
    steps = {run.recipe: study.steps_to_target(run.recipe) for run in study.runs}
    return Row(
        name=f"Steps to perplexity {perplexity_text(study.target_nats, 2)}",
        cells=tuple("not reached" if count is None else f"{count:,.0f}" for count in steps.values()),
        difference=_relative(study, [steps[run.recipe] for run in study.runs]),
        article="8000/8200/8400 +2.4 %",
    )


def _variance(study: Study) -> Row:
    values = [study.relative_variance(run.recipe) for run in study.runs]
    return Row(
        name="Gradient variance",
        cells=tuple(NOTHING if value is None else f"{value:.4f}×" for value in values),
        difference=_relative(study, values),
        article="1/1.02×/1.08× +6 %",
    )


def _gradient_error(study: Study) -> Row:
    return Row(
        name="Gradient error",
        cells=tuple(
            NOTHING if run.gradient_error is None else f"{100 * run.gradient_error:.2f} %" for run in study.runs
        ),
        difference=NOTHING,
        article=NOTHING,
    )


def _is_timed_alike(study: Study, device: str) -> bool:
    """Return True if all steps of all runs had the same number of CPU threads, or ran on a GPU."""
    numbers = {run.threads for run in study.runs}
    return device == "cuda" or (len(numbers) == 1 and len(study.baseline.threads) == 1)


def _throughput(study: Study, device: str) -> Row:
    values = [run.tokens_per_second for run in study.runs]
    alike = _is_timed_alike(study, device)
    ratios = [f"{value / values[0]:.2f}×" if alike else NOTHING for value in values]
    return Row(
        name="Tokens/s here",
        cells=tuple(f"{value:,.0f} ({ratio})" for value, ratio in zip(values, ratios, strict=True)),
        difference=_relative(study, values) if alike else NOTHING,
        article="1/1.15×/1.42× +23 %",
    )


def _memory(study: Study, device: str) -> Row:
    values = [run.peak_memory_bytes for run in study.runs]
    return Row(
        name="Peak memory, MiB",
        cells=tuple(NOTHING if value is None else f"{value / MIB:,.0f}" for value in values),
        # On a CPU the figure depends on the order of the runs: each includes memory left by earlier ones.
        difference=_relative(study, values) if device == "cuda" else NOTHING,
        article=NOTHING,
    )


def _relative(study: Study, values: Sequence[float | None]) -> str:
    pair = _fp8_and_bf16(study)
    by_recipe = dict(zip((run.recipe for run in study.runs), values, strict=True))
    fp8, bf16 = (by_recipe[run.recipe] for run in pair) if pair else (None, None)
    return NOTHING if fp8 is None or not bf16 else f"{100 * (fp8 / bf16 - 1):+.1f} %"


def _error(gap: Gap) -> str:
    """Format a standard error like its gap, or with one digit if that would read 0."""
    rounded = f"{gap.standard_error:.4f}"
    return rounded if float(rounded) or not gap.standard_error else f"{gap.standard_error:.0e}"


def _percent(gap: Gap) -> str:
    return f"{gap.percent:+.2f} %" if gap.percent < MOST_PLAIN else f"{gap.percent:+.3g} %"

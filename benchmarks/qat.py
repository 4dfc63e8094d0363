"""Quantization-aware training of SmolLM2-135M: FP8 tuned for FP8 against BF16 tuned on the same batches.

    python -m benchmarks.qat [--steps 60] [--batch-size 2] [--context 256] [--recipe static] [--windows 40]
        [--out FOLDER]

Both start from the same weights and see the same windows of the library's sources in the same order. Perplexity is
measured on Python's language topics, of which those have nothing: the first 40 windows of 512 tokens. The bar: FP8 at
most 0.5 % of perplexity above BF16, both tuned, paired over windows.
"""

import argparse
import time
from pathlib import Path

from torch import Tensor

from benchmarks import smollm2
from benchmarks.measure import hardware, markdown_table, publish
from octavo import recipes
from octavo.language_model import LanguageModel
from octavo.quantization import QATResult, QATSettings, TuneSettings, run_qat, text_windows
from octavo.quantization.comparison.evaluation_text import evaluation_windows
from octavo.quantization.qat.folder import save_qat
from octavo.text.corpus import Split
from octavo.text.sources import LIBRARY_SOURCES, TOPICS

BAR_PERCENT = 0.5
WINDOW = 512
DEFAULTS = TuneSettings()


def main() -> None:
    """Tune both, measure, print and write."""
    arguments = _arguments()
    machine, model = hardware(), smollm2.load()
    settings = QATSettings(
        recipe=recipes.get(arguments.recipe),
        scales=arguments.scales,
        skip=tuple(arguments.skip),
        by_data=arguments.by_data,
        baseline=True,
        tuning=TuneSettings(
            steps=arguments.steps,
            batch_size=arguments.batch_size,
            context=arguments.context,
            learning_rate=arguments.lr,
            high_precision_share=arguments.high_precision_share,
            distill=arguments.distill,
        ),
    )
    result = run_qat(
        model,
        settings,
        training=training_windows(model, settings.tuning),
        held_out=topic_windows(model, arguments.windows),
        on_phase=_StepPrinter(),
    )
    if arguments.out is not None:
        save_qat(arguments.out, result, source=LIBRARY_SOURCES, split=Split.TRAIN)
    publish(
        "qat",
        table(result),
        title="Trained for FP8",
        machine=machine,
        write=not arguments.quick,
        variant=variant(settings),
    )


def variant(settings: QATSettings) -> str:
    """Suffix of the result's file name: the kind of training."""
    ways = {"by_data": settings.by_data, "distilled": settings.tuning.distill > 0}
    return "_".join([settings.recipe.name, *(way for way, taken in ways.items() if taken)])


def training_windows(model: LanguageModel, tuning: TuneSettings) -> Tensor:
    """Windows of the training split, which the topics are not in."""
    return text_windows(
        model, LIBRARY_SOURCES, Split.TRAIN, count=tuning.windows, length=tuning.context, seed=tuning.seed
    )


def topic_windows(model: LanguageModel, count: int) -> Tensor:
    """The first windows of the text that perplexity is measured on."""
    return evaluation_windows(model, TOPICS, "all", count=count, length=WINDOW)


def table(result: QATResult) -> list[str]:
    """Table of the perplexities, and the verdict of the bar."""
    reference = result.reference
    rows = []
    for name in result.windows:
        gap = result.gap(name)
        above = ("–", "–") if name == reference else (
            f"{gap.percent:+.2f} %", f"{gap.nats:+.4f} ± {gap.standard_error:.4f}"
        )  # fmt: skip
        rows.append((name, f"{result.perplexity(name):.4f}", *above))
    lines = markdown_table(("model", "perplexity", f"above {reference}", "nats ± standard error"), rows)
    tuning, gap = result.settings.tuning, result.gap("fp8-qat")
    outcome = "met" if gap.percent <= BAR_PERCENT else "missed"
    lines += ["", f"- bar of {BAR_PERCENT} %: {outcome}, {gap.percent:+.2f} %"]
    tuned_gap = result.gap("fp8-qat", "fp8-of-tuned")
    lines.append(f"- fp8-qat against fp8-of-tuned: {tuned_gap.nats:+.4f} ± {tuned_gap.standard_error:.4f} nats")
    lines.append(
        f"- {tuning.steps} steps of {tuning.batch_size} windows of {tuning.context} tokens, peak learning rate "
        f"{tuning.learning_rate}, distillation weight {tuning.distill}, recipe {result.settings.recipe.name}, "
        f"{result.settings.scales} scales, skipped: {', '.join(result.settings.skip) or 'the head alone'}"
    )
    rounded = "by data after the last" if result.settings.by_data else "to the nearest"
    lines.append(f"- {tuning.high_precision_steps} steps without casts at the beginning; weights rounded {rounded}")
    lines.append("- the baseline learns from the text alone")
    for name, steps in result.steps.items():
        seconds = sorted(step.seconds for step in steps)[len(steps) // 2]
        lines.append(f"- {name}: {seconds:.1f} s a step (median)")
    return lines


class _StepPrinter:
    """Printer of a line when a phase begins and after each tenth of its steps."""

    def __init__(self) -> None:
        self.name, self.started = "", time.monotonic()

    def __call__(self, name: str, done: float, total: float, note: str = "") -> None:
        tenth = max(1, int(total) // 10)
        if name != self.name or done % tenth == 0:
            print(f"{time.monotonic() - self.started:6.0f} s  {name} {done}/{total} {note}", flush=True)
        self.name = name


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--lr", type=float, default=DEFAULTS.learning_rate)
    parser.add_argument("--high-precision-share", type=float, default=DEFAULTS.high_precision_share)
    parser.add_argument("--distill", type=float, default=DEFAULTS.distill)
    parser.add_argument("--by-data", action="store_true", help="round the weights by training windows at the end")
    parser.add_argument("--recipe", default="static")
    parser.add_argument("--scales", default="tracked")
    parser.add_argument("--skip", nargs="*", default=[], help="patterns of layers that stay in BF16")
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--out", type=Path, help="keep the model there, for benchmarks.quantization --tuned")
    parser.add_argument("--quick", action="store_true", help="prints, writes no result")
    return parser.parse_args()


if __name__ == "__main__":
    main()

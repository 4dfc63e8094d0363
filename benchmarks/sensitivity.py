"""Best mix of precisions for SmolLM2-135M: bytes at a perplexity within one percent of BF16's.

    python -m benchmarks.sensitivity [--windows 8] [--verify 40] [--pairs 24] [--mix FILE]
    python -m benchmarks.sensitivity --again FILE [--verify 40]

The mix is chosen on the library's sources, which are disjoint from the text of the verification: the first tokens of
Python's language topics, in windows of 512 without overlap. Weights are rounded to BF16 first, as in a BF16 checkpoint.
With --again, a mix that --mix wrote is measured on the following windows, which were not used to develop the search.

Bar: perplexity within 1.0 % of BF16's at no more than 0.60 of its bytes, including scales.
"""

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.progress import Progress, TaskID

from benchmarks import smollm2
from benchmarks.measure import hardware, markdown_table, publish, verdict
from octavo.language_model import LanguageModel
from octavo.quantization import load_mix, text_windows
from octavo.quantization.comparison.evaluation_text import evaluation_windows
from octavo.quantization.qat.tuning import window_nats
from octavo.quantization.sensitivity.bf16_reference import in_bf16
from octavo.quantization.sensitivity.mix import save_mix
from octavo.quantization.sensitivity.study import Budget, MixResult, Sensitivity, measure_sensitivity
from octavo.quantization.sensitivity.summary import how_ranked
from octavo.text.sources import LIBRARY_SOURCES, TOPICS
from octavo.training.comparison import paired_gap

CONTEXT, PERPLEXITY, BYTES = 512, 0.01, 0.60
SIZES, COSTS = ("bytes ÷ BF16", "FP8 products"), ("− BF16, nats (± standard error)", "perplexity", "KL, nats")
COLUMNS = ("mix", *SIZES, *COSTS, "windows", "verdict")


def main() -> None:
    """Choose, verify, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--verify", type=int, default=40)
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own number")
    parser.add_argument("--mix", type=Path, help="write the mix there")
    parser.add_argument("--again", type=Path, help="measure the mix in this file on the windows after --verify")
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    machine, model = hardware(), smollm2.load()
    write = not arguments.no_write
    if arguments.again is None:
        title, lines = "SmolLM2-135M: the best mix of precisions", list(_chosen(model, arguments))
        publish("sensitivity", lines, title=title, machine=machine, write=write)
    else:
        title, lines = "SmolLM2-135M: a mix on other text", list(_again(model, arguments))
        publish("sensitivity", lines, title=title, machine=machine, write=write, variant="again")


def _chosen(model: LanguageModel, arguments: argparse.Namespace) -> Iterator[str]:
    """Choose a mix and verify it; yield the lines of the result."""
    started = time.monotonic()
    chosen_on = text_windows(model, LIBRARY_SOURCES, "train", count=arguments.windows, length=CONTEXT)
    verified_on = evaluation_windows(model, TOPICS, "all", count=arguments.verify, length=CONTEXT)
    with Progress() as progress:
        tasks: dict[str, TaskID] = {}

        def show(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = progress.add_task(phase, total=total)
            progress.update(tasks[phase], completed=done)

        sensitivity = measure_sensitivity(
            model.model,
            chosen_on,
            verified_on,
            budget=Budget(perplexity=PERPLEXITY, bytes_share=BYTES),
            true_pairs=arguments.pairs,
            on_progress=show,
        )
    if arguments.mix is not None and sensitivity.mix is not None:
        save_mix(sensitivity.mix, arguments.mix)
    yield from (*table(sensitivity), "", *notes(sensitivity, time.monotonic() - started))


def _again(model: LanguageModel, arguments: argparse.Namespace) -> Iterator[str]:
    """Compare a mix in a file with BF16 on the windows after the first; yield the lines of the result."""
    windows = evaluation_windows(model, TOPICS, "all", count=2 * arguments.verify, length=CONTEXT)[arguments.verify :]
    with in_bf16(model.model):
        reference_nats = window_nats(model.model, windows)
        load_mix(arguments.again).apply(model.model)
        gap = paired_gap(window_nats(model.model, windows), reference_nats)
    yield f"The {len(windows)} windows of {CONTEXT} tokens after the first {arguments.verify}; differences are paired."
    yield ""
    outcome = verdict(gap.nats <= math.log1p(PERPLEXITY))
    yield f"- {outcome}: {gap.percent:+.2f} % of perplexity (bar {PERPLEXITY:.1%})"
    base = math.fsum(reference_nats) / len(reference_nats)
    yield f"- {gap.nats:+.4f} ± {gap.standard_error:.4f} nats; BF16 loses {base:.4f}"


def table(sensitivity: Sensitivity) -> Iterator[str]:
    """Yield the table of the best mix, with its verdict, and of other mixes."""
    yield from markdown_table(COLUMNS, rows_of(sensitivity))


def rows_of(sensitivity: Sensitivity) -> Iterator[list[str]]:
    """Yield a row for the best mix and for each of the others."""
    if sensitivity.best is not None:
        reached = sensitivity.is_met and sensitivity.best.bytes_share <= BYTES
        yield _row("best within 1.0 % and 0.60", sensitivity.best, verdict(reached))
    for one in (*sensitivity.front, *sensitivity.presets):
        name = "least loss for its bytes" if one.name == "front" else f"`{one.name}`, head in BF16"
        yield _row(name, one, "–")


def _row(name: str, one: MixResult, judged: str) -> list[str]:
    true = one.verified
    assert true is not None
    return [
        name,
        f"{one.bytes_share:.4f}",
        f"{one.fp8_products:.0%}",
        f"{true.nats:+.4f} ± {true.error:.4f}",
        f"{true.perplexity_increase:+.2%}",
        f"{true.divergence:.4f}",
        str(true.windows),
        judged,
    ]


def notes(sensitivity: Sensitivity, seconds: float) -> Iterator[str]:
    """Yield notes on the ranking, the attempts and the time."""
    yield how_ranked(sensitivity)
    for number, (guessed, true) in enumerate(sensitivity.attempts, 1):
        yield (
            f"Attempt {number}: parts add up to {guessed:.4f} nats; on the windows it was chosen on "
            f"{true.nats:+.4f} ± {true.error:.4f}, divergence {true.divergence:.4f}."
        )
    if sensitivity.best is None:
        yield "No mix was within both budgets on the windows it was chosen on: missed."
    yield f"{seconds:.0f} s in all, {torch.get_num_threads()} threads."


if __name__ == "__main__":
    main()

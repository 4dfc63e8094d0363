"""Loss of FP8 training against BF16, in the demo's setting with several seeds.

    python -m benchmarks.accuracy [--seeds 3] [--recipes bf16,tensorwise] [--out runs/accuracy]

Each seed is a separate study: the recipes share its initial weights and batches, and the gap of a seed is paired over
the held-out windows. The bar applies to the mean gap, which is given with its standard error over the seeds. The spread
of the BF16 runs over the seeds is given for scale only: pairing removes it from the gap. Finished runs are kept in
``--out``, so that an interrupted benchmark continues.
"""

import argparse
import math
import statistics
from pathlib import Path

from rich.console import Console

from benchmarks.measure import hardware, markdown_table, publish
from octavo.experiments.run_measures import Phase
from octavo.experiments.study import run_study
from octavo.text.tokens import prepare
from octavo.training.comparison import GAP_BAR_NATS, Study
from octavo.training.config import demo_config

BASE = "bf16"


def main() -> None:
    """Train, compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--recipes", default="bf16,tensorwise", help="bf16 first")
    parser.add_argument("--out", type=Path, default=Path("runs/accuracy"))
    parser.add_argument("--quick", action="store_true", help="the quick demo's model; prints, writes no result")
    arguments = parser.parse_args()
    console, machine = Console(), hardware()
    config = demo_config(quick=arguments.quick)
    data = prepare(config.data.source, arguments.out / "data", vocab_size=config.data.vocab_size)
    recipes = arguments.recipes.split(",")
    studies = []
    for seed in range(arguments.seeds):
        folder = arguments.out / f"seed-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        seeded = config.with_training(seed=seed)
        studies.append(run_study(seeded, folder, data=data, recipes=recipes, on_phase=_SeedPrinter(console, seed)))
    lines = _table(studies, recipes)
    publish("accuracy", lines, title="FP8 against BF16", machine=machine, write=not arguments.quick)


class _SeedPrinter:
    """Printer of one line per phase."""

    def __init__(self, console: Console, seed: int) -> None:
        self.console, self.seed, self.name = console, seed, ""

    def __call__(self, phase: Phase) -> None:
        if phase.name != self.name:
            self.name = phase.name
            self.console.print(f"seed {self.seed}: {phase.name}", markup=False)


def _table(studies: list[Study], recipes: list[str]) -> list[str]:
    columns = ["seed", *(f"{recipe} nats" for recipe in recipes)]
    columns += [f"{recipe} − {BASE} (± standard error)" for recipe in recipes[1:]]
    rows = []
    for seed, study in enumerate(studies):
        gaps = [study.gap(recipe, BASE) for recipe in recipes[1:]]
        cells = [f"{study.run(recipe).nats:.4f}" for recipe in recipes]
        cells += [f"{gap.nats:+.4f} ± {gap.standard_error:.4f}" for gap in gaps]
        rows.append([str(seed), *cells])
    lines = markdown_table(columns, rows)
    base = [study.run(BASE).nats for study in studies]
    for recipe in recipes[1:]:
        lines += ["", *verdict_lines(recipe, [study.gap(recipe, BASE).nats for study in studies], base)]
    facts = studies[0].facts
    lines += ["", *(f"- {name}: {fact}" for name, fact in facts.items() if name != "seed")]
    lines += [f"- {studies[0].run(BASE).steps} steps; unigram entropy {studies[0].unigram_nats:.4f} nats"]
    return lines


def verdict_lines(recipe: str, gaps: list[float], base: list[float]) -> list[str]:
    """Lines on the mean of the paired gaps and its error, the bar, and the spread of the BF16 runs.

    Args:
        recipe: recipe of the gaps.
        gaps: one per seed, in nats.
        base: the BF16 run's loss of each seed, in nats.
    """
    mean, spread = statistics.mean(gaps), max(base) - min(base)
    error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
    outcome, side = ("met", "below") if mean <= GAP_BAR_NATS else ("missed", "above")
    where = "inside" if abs(mean) <= spread else "outside"
    paired = (
        f"- {recipe}, paired: mean gap {mean:+.4f} ± {error:.4f} nats (standard error of the mean over {len(gaps)} "
        f"seeds), {100 * math.expm1(mean):+.2f} % of perplexity"
    )
    off = abs(mean - GAP_BAR_NATS)
    bar = f"- bar of {GAP_BAR_NATS:.4f} nats: {outcome}; the mean lies {off:.4f} ± {error:.4f} {side} it"
    scale = (
        f"- for scale only: BF16 itself ends between {min(base):.4f} and {max(base):.4f} nats over the seeds, a spread "
        f"of {spread:.4f}; the gap lies {where} it, which says nothing about the bar"
    )
    return [paired, bar, scale]


if __name__ == "__main__":
    main()

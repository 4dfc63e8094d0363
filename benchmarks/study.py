"""The study of docs/study.md: what FP8 costs in accuracy, and published claims rerun.

    python -m benchmarks.study [--parts recipes,phases] [--jobs 2] [--out runs/study] [--known FILE]

The part "recipes" trains BF16, FP32 and five FP8 recipes with five seeds, BF16 and tensorwise with three more; every
other part is a preset of ``octavo study`` with three. Each is ``octavo study --config benchmarks/study.toml`` in a
folder of its own below ``--out``: about two minutes a run on two cores, and what was interrupted goes on. A run that
has been finished in another part, with the same configuration, is not trained again. ``--known`` is a file of finished
runs: read if it exists, and written with all that are finished.
"""

import argparse
import gzip
import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.measure import hardware, markdown_table, publish
from octavo.experiments import grid_tables
from octavo.experiments.bars import BARS, Bars, save_bars, study_bars
from octavo.experiments.cells import CellResult, Variant
from octavo.experiments.claims import Outcome, outcomes
from octavo.experiments.grid import CELLS, Grid, finished_cells
from octavo.experiments.grid_comparison import GridComparison
from octavo.experiments.presets import PRESETS
from octavo.experiments.run_measures import MEASURES
from octavo.files import write_atomically
from octavo.text.corpus import Split, content_hash
from octavo.text.sources import load_documents
from octavo.text.tokens import open_data
from octavo.training.config import RunConfig, load_config
from octavo.training.evaluate import unigram_entropy

CONFIG = Path(__file__).with_name("study.toml")
RECIPES = ("bf16", "tensorwise", "fp32", "rowwise", "blockwise", "delayed", "mxfp8")
PICTURE = Path(__file__).parents[1] / "docs/images/study.svg"
SEEDS, OF_FIRST_TWO, OF_PRESETS = 5, 8, 3


def grids_of(part: str) -> list[Grid]:
    """The grids of a part, all in one folder."""
    if part != "recipes":
        return [PRESETS[part].grid(tuple(range(OF_PRESETS)))]
    variants = tuple(Variant(name=name, recipe=name) for name in RECIPES)
    return [
        Grid(variants=variants, seeds=tuple(range(SEEDS))),
        Grid(variants=variants[:2], seeds=tuple(range(OF_FIRST_TWO))),
    ]


class FinishedRuns:
    """Measures of finished runs by their configuration and text, as text of their measures.json.

    Args:
        file: JSON Lines of them, compressed; None keeps none.
        text: content hash of this study's text; runs on others are kept, and not given.
    """

    def __init__(self, file: Path | None, text: str) -> None:
        self.file, self.text = file, text
        lines = gzip.decompress(file.read_bytes()).decode().splitlines() if file is not None and file.exists() else []
        self._lines = {_run(line): line for line in lines}

    def __str__(self) -> str:
        of_text = sum(text == self.text for _, text in self._lines)
        return f"{of_text} of {len(self._lines)} known runs are of this text, {self.text}; all others are trained"

    def add(self, folder: Path) -> None:
        """Add the runs of a folder."""
        for path in sorted(folder.glob(f"{CELLS}/*/{MEASURES}")):
            line = path.read_text().strip()
            self._lines[_run(line)] = line
        if self.file is not None:
            lines = "".join(f"{line}\n" for line in self._lines.values())
            write_atomically(self.file, gzip.compress(lines.encode(), mtime=0))

    def give(self, grid: Grid, base: RunConfig, folder: Path) -> None:
        """Write the measures of a grid's runs that are known into its folder."""
        for cell in grid.cells:
            path = folder / CELLS / cell.name / MEASURES
            known = self._lines.get((cell.config(base).config_hash(), self.text))
            if known is not None and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, f"{known}\n")


def _run(line: str) -> tuple[str, str]:
    measures = json.loads(line)
    return measures["config"], measures["data"]


def run(part: str, grid: Grid, folder: Path, jobs: int) -> None:
    """Run a grid by the command."""
    what = ["--preset", part]
    if part == "recipes":
        what = ["--recipes", ",".join(variant.name for variant in grid.variants)]
    options = ["--config", str(CONFIG), "--seeds", str(len(grid.seeds)), "--jobs", str(jobs), "--out", str(folder)]
    subprocess.run([sys.executable, "-m", "octavo", "study", *what, *options], check=True)


def comparison_of(grids: Sequence[Grid], base: RunConfig, folder: Path) -> GridComparison:
    """Compare the finished runs of a part."""
    data = open_data(folder / "data")
    results: dict[str, CellResult] = {}
    for grid in grids:
        results |= {result.cell.name: result for result in finished_cells(grid, base, folder, data)}
    return GridComparison(
        results.values(),
        baseline=grids[0].variants[0].name,
        bars=study_bars(folder / BARS),
        unigram_nats=unigram_entropy(data, Split.VALIDATION),
    )


def claims_of(comparisons: Mapping[str, GridComparison]) -> dict[str, list[Outcome]]:
    """Outcomes of the parts' claims, tested together with those of the presets that are not among the parts."""
    tests = [(part, claim) for part in comparisons if part in PRESETS for claim in PRESETS[part].claims]
    every = sum(len(preset.claims) for preset in PRESETS.values())
    found = outcomes([(claim, comparisons[part]) for part, claim in tests], among=every)
    return {name: [one for one, (part, _) in zip(found, tests, strict=True) if part == name] for name in comparisons}


def tables(part: str, comparison: GridComparison, claims: Sequence[Outcome]) -> Iterator[str]:
    """Lines of a part's tables."""
    measures = [comparison.measures(group) for group in comparison.groups]
    yield from ("", f"## {part}", "")
    if part in PRESETS:
        yield from (*markdown_table(grid_tables.CLAIM_COLUMNS, grid_tables.claim_rows(claims)), "")
    yield from markdown_table(grid_tables.GAP_COLUMNS, grid_tables.gap_rows(comparison, measures))
    if measures[0].spread is not None:
        yield from ("", f"Standard deviation of the baseline over its seeds: {measures[0].spread:.4f} nats.")
    if part in PRESETS:
        return
    yield ""
    yield from markdown_table(grid_tables.RANKING_COLUMNS, grid_tables.ranking_rows(comparison.ranking(1.0, 1.0)))
    columns = grid_tables.cost_columns(comparison.bars.targets)
    yield from ("", *markdown_table(columns, grid_tables.cost_rows(measures)))
    for note in grid_tables.notes(comparison, measures):
        yield from ("", note)


def introduction(comparison: GridComparison, text: str) -> Iterator[str]:
    """Lines above the tables: model, text, bars."""
    bars = ", ".join(f"{name} {value}" for name, value in asdict(comparison.bars).items())
    yield (
        "1.3 million parameters, 450 steps of 1,024 tokens of the standard library of Python "
        f"{platform.python_version()} (content hash {text}); a row's gap is to the part's first row."
    )
    yield from ("", f"Bars (the defaults since 21e640c6, before the first run): {bars}.")
    yield "p-values of claims are Holm's over the claims of all presets, of those too that are not here."
    yield "Times are of runs that shared the machine with other work."


def picture(comparison: GridComparison) -> str:
    """SVG of the recipes' gaps with their intervals, and the bar."""
    gaps = [(f"{each.group[0]}, {each.seeds} seeds", each.gap) for each in map(comparison.measures, comparison.groups)]
    rows = [(name, gap) for name, gap in gaps if gap is not None]
    widest, height = max(max(abs(gap.low), abs(gap.high)) for _, gap in rows), 30 * len(rows) + 70

    def x(nats: float) -> float:
        return round(370 + 220 * nats / widest, 1)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" font-family="sans-serif" font-size="14">',
        f'<rect width="720" height="{height}" fill="white"/>',
    ]
    bar = comparison.bars.gap_nats
    for nats, colour, text in ((0.0, "#666", "BF16"), (bar, "#1f6e43", f"bar: +{bar:g}")):
        lines.append(f'<path d="M{x(nats)} 30V{height - 40}" stroke="{colour}" stroke-dasharray="4 3"/>')
        lines.append(f'<text x="{x(nats)}" y="20" fill="{colour}" text-anchor="middle">{text}</text>')
    for y, (name, gap) in zip(range(50, height, 30), rows, strict=False):
        lines.append(f'<text x="10" y="{y + 5}">{name}</text><text x="640" y="{y + 5}">{gap.estimate:+.4f}</text>')
        lines.append(f'<path d="M{x(gap.low)} {y}H{x(gap.high)}" stroke="#c2410c" stroke-width="2"/>')
        lines.append(f'<circle cx="{x(gap.estimate)}" cy="{y}" r="5" fill="#c2410c"/>')
    lines.append(f'<text x="370" y="{height - 15}" text-anchor="middle">final loss above BF16, nats, 95 %</text>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    """Train, compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="recipes", help=f"recipes, {', '.join(PRESETS)}")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    parser.add_argument("--known", type=Path)
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    machine, base = hardware(), load_config(CONFIG)
    text = content_hash(load_documents(base.data.source))
    finished, comparisons = FinishedRuns(arguments.known, text), {}
    print(finished)
    for part in arguments.parts.split(","):
        folder = arguments.out / part
        grids = grids_of(part)
        if not folder.exists():
            folder.mkdir(parents=True)
            save_bars(Bars(), folder / BARS)
        for grid in grids:
            finished.give(grid, base, folder)
            run(part, grid, folder, arguments.jobs)
            finished.add(folder)
        comparisons[part] = comparison_of(grids, base, folder)
    lines, claims = list(introduction(next(iter(comparisons.values())), text)), claims_of(comparisons)
    for part, comparison in comparisons.items():
        lines += tables(part, comparison, claims[part])
    if not arguments.no_write and "recipes" in comparisons:
        write_atomically(PICTURE, picture(comparisons["recipes"]))
    title = "What FP8 costs in accuracy, and published claims rerun"
    publish("study", lines, title=title, machine=machine, write=not arguments.no_write)


if __name__ == "__main__":
    main()

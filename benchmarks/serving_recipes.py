"""Perplexity and bytes of SmolLM2-135M under each recipe of ``octavo serve``.

    python -m benchmarks.serving_recipes [--windows 40] [--samples 128] [--no-write]

The text is the first 20,480 tokens of Python's language reference in windows of 512, read by the runner of a server
with the recipe's weights and inputs (``octavo.inference.recipes``). Keys and values are in BF16, and in FP8 in the last
row, the default of ``octavo serve``. fp8-static is calibrated on the library's sources. Differences from the recipe
bf16 are paired by window.
"""

import argparse
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from benchmarks import smollm2
from benchmarks.kv_cache import runner_nats
from benchmarks.measure import hardware, markdown_table, publish
from octavo import E4M3
from octavo.errors import DataError
from octavo.formats import BF16, Format
from octavo.inference import ModelRunner, ServingRecipe, load_served_model
from octavo.language_model import load_language_model
from octavo.quantization import calibrate, text_windows
from octavo.quantization.comparison.evaluation_text import evaluation_windows
from octavo.text.sources import LIBRARY_SOURCES, TOPICS
from octavo.training.comparison import paired_gap

LENGTH = 512
HEADER = ["recipe", "keys and values", "perplexity", "against bf16", "nats more (± standard error)", "weights ÷ bf16"]


def main() -> None:
    """Read, compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=40, help="of 512 tokens")
    parser.add_argument("--samples", type=int, default=128, help="windows that fp8-static is calibrated on")
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    machine = hardware()
    try:
        path = smollm2.model_path()
    except DataError as error:
        parser.exit(2, f"{error}\n")
    model = load_language_model(path)
    text = evaluation_windows(model, TOPICS, "all", count=arguments.windows, length=LENGTH)
    other = text_windows(model, LIBRARY_SOURCES, "train", count=arguments.samples, length=LENGTH)
    with tempfile.TemporaryDirectory() as scratch:
        scales = Path(scratch) / "scales"
        calibrate(model, other.split(1)).save(scales)
        results = [measured(path, recipe, scales, text) for recipe in ServingRecipe]
        results.append(measured(path, ServingRecipe.FP8, scales, text, fmt=E4M3))
    title = "SmolLM2-135M in the recipes of octavo serve"
    lines = [f"{len(text)} windows of {LENGTH} tokens.", "", *table(results)]
    publish("serving_recipes", lines, title=title, machine=machine, write=not arguments.no_write)


@dataclass(frozen=True, slots=True)
class Measured:
    """Losses of a recipe, one per window, and the bytes of its weights."""

    recipe: str
    fmt: Format
    nats: Sequence[float]
    nbytes: int


def measured(path: Path, recipe: ServingRecipe, scales: Path, windows: Tensor, fmt: Format = BF16) -> Measured:
    """The loss of each window, with keys and values in a format."""
    calibration = scales if recipe is ServingRecipe.FP8_STATIC else None
    runner: ModelRunner = load_served_model(path, recipe=recipe, calibration=calibration).runner
    steps = track(windows, description=recipe, console=Console(stderr=True))
    with torch.inference_mode():
        return Measured(recipe, fmt, [runner_nats(runner, fmt, window) for window in steps], runner.weight_bytes)


def table(results: Sequence[Measured]) -> list[str]:
    """Table with a row per recipe, compared with the first."""
    base, rows = results[0], []
    for result in results:
        gap = paired_gap(result.nats, base.nats)
        percent, nats = f"{gap.percent:+.2f} %", f"{gap.nats:+.4f} ± {gap.standard_error:.4f}"
        perplexity = math.exp(math.fsum(result.nats) / len(result.nats))
        differs = ["", ""] if result is base else [percent, nats]
        rows.append(
            [result.recipe, result.fmt.name, f"{perplexity:.4f}", *differs, f"{result.nbytes / base.nbytes:.3f}"]
        )
    return markdown_table(HEADER, rows)


if __name__ == "__main__":
    main()

"""SmolLM2-135M as ``octavo serve`` holds it, recipe by recipe: what each costs of its perplexity, and its bytes.

    python -m benchmarks.serving_recipes [--windows 40] [--samples 128] [--no-write]

The first 20,480 tokens of Python's language reference in windows of 512, each read by the runner of a server whose
weights and inputs the recipe says (``octavo.inference.recipes``). Keys and values are in BF16 but in the last row,
which is what ``octavo serve`` does when it is told nothing. fp8-static is calibrated on the library's sources.
Differences from the recipe bf16 are paired, window by window.
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
        found = [measured(path, recipe, scales, text) for recipe in ServingRecipe]
        found.append(measured(path, ServingRecipe.FP8, scales, text, fmt=E4M3))
    title = "SmolLM2-135M in the recipes of octavo serve"
    lines = [f"{len(text)} windows of {LENGTH} tokens.", "", *table(found)]
    publish("serving_recipes", lines, title=title, machine=machine, write=not arguments.no_write)


@dataclass(frozen=True, slots=True)
class Measured:
    """A recipe's losses, one a window, and the bytes of its weights."""

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


def table(found: Sequence[Measured]) -> list[str]:
    """A row each; the first is what the others are compared with."""
    base, rows = found[0], []
    for one in found:
        gap = paired_gap(one.nats, base.nats)
        percent, nats = f"{gap.percent:+.2f} %", f"{gap.nats:+.4f} ± {gap.standard_error:.4f}"
        perplexity = math.exp(math.fsum(one.nats) / len(one.nats))
        differs = ["", ""] if one is base else [percent, nats]
        rows.append([one.recipe, one.fmt.name, f"{perplexity:.4f}", *differs, f"{one.nbytes / base.nbytes:.3f}"])
    return markdown_table(HEADER, rows)


if __name__ == "__main__":
    main()

"""Options that several commands share, and how they become a run's configuration."""

from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli.data import DATA_HELP
from octavo.training.config import RunConfig, config_from_dict, load_config
from octavo.training.recipe_choice import PLAIN_RECIPES

__all__ = [
    "BatchSize",
    "CheckpointInterval",
    "ConfigFile",
    "Context",
    "Device",
    "EvalInterval",
    "Json",
    "LearningRate",
    "Seed",
    "Source",
    "Steps",
    "Threads",
    "VocabSize",
    "Warmup",
    "configured",
]

ConfigFile = Annotated[Path | None, typer.Option("--config", help="A TOML file; missing keys keep their defaults.")]
Source = Annotated[str | None, typer.Option("--data", help=DATA_HELP)]
Steps = Annotated[int | None, typer.Option(help="Optimizer updates.")]
LearningRate = Annotated[float | None, typer.Option("--lr", help="Peak learning rate.")]
Warmup = Annotated[int | None, typer.Option(help="Updates until the peak learning rate.")]
BatchSize = Annotated[int | None, typer.Option(help="Sequences of a micro-batch.")]
Context = Annotated[int | None, typer.Option(help="Tokens of a sequence.")]
Seed = Annotated[int | None, typer.Option(help="Seed of weights and batches.")]
VocabSize = Annotated[int | None, typer.Option(help="Tokens of the vocabulary.")]
EvalInterval = Annotated[int | None, typer.Option(help="Updates between evaluations.")]
CheckpointInterval = Annotated[int | None, typer.Option(help="Updates between checkpoints.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; 0 leaves torch's choice.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def configured(base: Path | None, *, source: str | None, vocab_size: int | None, **training: Any) -> RunConfig:
    """The file's configuration (or the defaults) with what the command line sets; None leaves a key as it is.

    A recipe in high precision leaves out what only an FP8 run of the file has: options, phases, the autopilot.

    Raises:
        ConfigError: a key or value that is not allowed.
    """
    config = RunConfig() if base is None else load_config(base)
    if training.get("recipe") in PLAIN_RECIPES:
        config = config.with_recipe(training["recipe"])
    raw = config.to_dict()
    raw["data"] |= {key: value for key, value in (("source", source), ("vocab_size", vocab_size)) if value is not None}
    raw["training"] |= {key: value for key, value in training.items() if value is not None}
    return config_from_dict(raw)

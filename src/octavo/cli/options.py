"""Options that several commands share, and how they become a run's configuration."""

from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli.data import DATA_HELP
from octavo.errors import ConfigError
from octavo.numerics.cast_spec import check_member
from octavo.text.sources import LIBRARY_SOURCES
from octavo.training.config import MOST_SEED, RunConfig, config_from_dict, load_config
from octavo.training.config import Device as Place
from octavo.training.recipe_choice import PLAIN_RECIPES

__all__ = [
    "BatchSize",
    "CheckpointInterval",
    "ConfigFile",
    "Context",
    "Device",
    "EvalInterval",
    "Head",
    "Hub",
    "Json",
    "LearningRate",
    "Model",
    "ModelText",
    "Seed",
    "Skip",
    "Source",
    "Steps",
    "Threads",
    "VocabSize",
    "Warmup",
    "WindowSeed",
    "configured",
    "device_of",
    "read_api_key",
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
Threads = Annotated[int | None, typer.Option(help="CPU threads; 0 leaves torch's choice. [default: free cores]")]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.")]
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A run's folder, a Hugging Face folder or name, or a .gguf file.")
]
Hub = Annotated[bool, typer.Option("--hub", help="Download MODEL, a name on Hugging Face's hub, first.")]
ModelText = Annotated[
    str | None, typer.Option("--data", help=f"{DATA_HELP} [default: a run's own; {LIBRARY_SOURCES} for other models]")
]
Skip = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Layers to leave in high precision, such as '*.o_proj'; may repeat."),
]
Head = Annotated[bool, typer.Option("--head", help="Take the language-model head too.")]
WindowSeed = Annotated[
    int | None, typer.Option(min=0, max=MOST_SEED, help="Seed of the windows' places in the text. [default: 0]")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def device_of(given: str | None) -> Place:
    """What ``--device`` says; without it, CUDA if there is a device.

    Raises:
        ConfigError: another word.
    """
    word = Place.AUTO if given is None else given
    check_member("device", word, tuple(Place))
    return Place(word)


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


def read_api_key(path: Path) -> str:
    """The key that a file holds.

    Raises:
        ConfigError: it is not one line of ASCII.
    """
    try:
        key = path.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{str(path)!r} is not text, so it holds no key; write one line of ASCII") from error
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"{str(path)!r} holds no key: it has to be one line of ASCII characters")
    return key

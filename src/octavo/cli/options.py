"""Options shared by several commands, and a run's configuration from them."""

from collections.abc import Mapping
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
    "refuse_given",
]

ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file; missing keys keep their defaults.")]
Source = Annotated[str | None, typer.Option("--data", help=DATA_HELP)]
Steps = Annotated[int | None, typer.Option(help="Number of optimizer updates.")]
LearningRate = Annotated[float | None, typer.Option("--lr", help="Peak learning rate.")]
Warmup = Annotated[int | None, typer.Option(help="Updates of linear warmup to the peak learning rate.")]
BatchSize = Annotated[int | None, typer.Option(help="Sequences per micro-batch.")]
Context = Annotated[int | None, typer.Option(help="Tokens per sequence.")]
Seed = Annotated[int | None, typer.Option(help="Seed of weights and batches.")]
VocabSize = Annotated[int | None, typer.Option(help="Size of the vocabulary.")]
EvalInterval = Annotated[int | None, typer.Option(help="Updates between evaluations.")]
CheckpointInterval = Annotated[int | None, typer.Option(help="Updates between checkpoints.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; 0 uses torch's default. [default: free cores]")]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.")]
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A run's folder, a Hugging Face folder or name, or a .gguf file.")
]
Hub = Annotated[bool, typer.Option("--hub", help="Download MODEL from the Hugging Face Hub first.")]
ModelText = Annotated[
    str | None, typer.Option("--data", help=f"{DATA_HELP} [default: a run's own; {LIBRARY_SOURCES} for other models]")
]
Skip = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Layers to leave in high precision, such as '*.o_proj'; repeatable."),
]
Head = Annotated[bool, typer.Option("--head", help="Include the language-model head.")]
WindowSeed = Annotated[
    int | None, typer.Option(min=0, max=MOST_SEED, help="Seed of the windows' positions in the text. [default: 0]")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def refuse_given(options: Mapping[str, object], reason: str) -> None:
    """Raise ConfigError for the first option that was given.

    Args:
        options: values by option; None for an option that was not given.
        reason: message with ``{}`` for the option's name.
    """
    for name, value in options.items():
        if value is not None:
            raise ConfigError(reason.format(name))


def device_of(given: str | None) -> Place:
    """Device of ``--device``; None is ``auto``, which is CUDA if available.

    Raises:
        ConfigError: an unknown device.
    """
    name = Place.AUTO if given is None else given
    check_member("device", name, tuple(Place))
    return Place(name)


def configured(base: Path | None, *, source: str | None, vocab_size: int | None, **training: Any) -> RunConfig:
    """Configuration of a file (or the defaults), overridden by command-line values that are not None.

    A high-precision recipe drops the file's keys that only apply to FP8: options, phases, the autopilot.

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
    """Read an API key from a file.

    Raises:
        ConfigError: the file is not one line of ASCII.
    """
    try:
        key = path.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{str(path)!r} is not text; write the key into it as one line of ASCII") from error
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"{str(path)!r} holds no key; write the key into it as one line of ASCII")
    return key

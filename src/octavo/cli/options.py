"""Options shared by several commands, and a run's configuration from them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.errors import ConfigError
from octavo.numerics.cast_spec import check_member
from octavo.text.named_datasets import hub_access
from octavo.text.source_settings import with_column
from octavo.text.sources import LIBRARY_SOURCES
from octavo.training.config import MOST_SEED, RunConfig, config_from_dict, load_config
from octavo.training.config import Device as Place
from octavo.training.recipe_choice import PLAIN_RECIPES

__all__ = [
    "DATA_HELP",
    "AsServedBy",
    "BatchSize",
    "CheckpointInterval",
    "ConfigFile",
    "Context",
    "DataHub",
    "Device",
    "EvalInterval",
    "EvaluatedSplit",
    "EvaluatedText",
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
    "TextColumn",
    "Threads",
    "VocabSize",
    "Warmup",
    "WindowSeed",
    "configured",
    "device_of",
    "read_api_key",
    "refuse_given",
]

DATA_HELP = (
    "'builtin' (Python's library sources and language reference, also alone as 'library-sources' and "
    "'language-topics'), a text file, a folder of .txt/.md/.jsonl/.parquet, or a Hugging Face dataset name with --hub."
)

AsServedBy = Annotated[
    str | None,
    typer.Option(
        metavar="ENGINE", help="Train with the forward pass of an engine, such as vllm-block; see octavo agree."
    ),
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
EvaluatedText = Annotated[
    str | None,
    typer.Option("--data", help=f"{DATA_HELP} [default: a run's own; language-topics for other models]"),
]
EvaluatedSplit = Annotated[
    str | None,
    typer.Option(help="train, validation, test or all. [default: test of a run's own data, all of other data]"),
]
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A run's folder, a Hugging Face folder or name, or a .gguf file.")
]


def _allow_hub(context: typer.Context, *, value: bool) -> bool:
    if value:
        context.with_resource(hub_access())
    return value


Hub = Annotated[
    bool,
    typer.Option("--hub", help="Look names of models and data sets up on the Hugging Face Hub.", callback=_allow_hub),
]
DataHub = Annotated[
    bool, typer.Option("--hub", help="Read the --data of that name from the Hugging Face Hub.", callback=_allow_hub)
]
TextColumn = Annotated[
    str | None, typer.Option(help="Column of --data to read. [default: text, or the only column of strings]")
]
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


def configured(
    base: Path | None,
    *,
    source: str | None,
    vocab_size: int | None,
    text_column: str | None = None,
    parallel: Mapping[str, Any] | None = None,
    **training: Any,
) -> RunConfig:
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
    if text_column is not None:
        raw["data"]["source"] = with_column(raw["data"]["source"], text_column)
    raw["parallel"] |= {key: value for key, value in (parallel or {}).items() if value is not None}
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

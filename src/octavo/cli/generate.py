"""``octavo generate``: text from a run, printed as it is written."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer

from octavo.cli.runs import check_is_run
from octavo.errors import ConfigError
from octavo.models.generation import generate as continue_tokens
from octavo.training.config import MOST_SEED
from octavo.training.run_folder import TrainedRun, load_run

__all__ = ["generate"]

CHUNK_TOKENS = 8
UNFINISHED = "\ufffd"  # what a character decodes to while some of its bytes are missing


def generate(
    *,
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write.")] = 120,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample among the k likeliest only.")] = 40,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
) -> None:
    """Continue a prompt with a trained model."""
    check_is_run(run_dir)
    if not 0 <= seed <= MOST_SEED:
        raise ConfigError(f"seed must be from 0 to {MOST_SEED}, not {seed}")
    run = load_run(run_dir)
    text = _stream(run, prompt, max_new_tokens, temperature=temperature, top_k=top_k, seed=seed)
    first = next(text, "")  # bad values are refused before anything is printed
    _write(prompt + first)
    for piece in text:
        _write(piece)
    _write("\n")


def _stream(
    run: TrainedRun, prompt: str, count: int, *, temperature: float, top_k: int | None, seed: int
) -> Iterator[str]:
    """Pieces of new text, a few tokens at a time."""
    ids = run.tokenizer.encode(prompt, add_special_tokens=False).ids
    generator = torch.Generator().manual_seed(seed)
    prompt_length, written = len(ids), 0
    while True:
        left = count - (len(ids) - prompt_length)
        with run.surroundings:
            ids += continue_tokens(
                run.model,
                ids,
                max_new_tokens=min(CHUNK_TOKENS, left),
                temperature=temperature,
                top_k=top_k,
                generator=generator,
                context=run.config.training.context,
            )
        text = str(run.tokenizer.decode(ids[prompt_length:])).rstrip(UNFINISHED)
        yield text[written:]
        written = len(text)
        if left <= CHUNK_TOKENS:
            return


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()

"""``octavo generate``: text from a run or a GGUF file, printed as it is written.

A run's model computes as it was trained. A file's model is for generation only: its weights become FP8 codes.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from octavo.cli.runs import check_is_run
from octavo.errors import ConfigError
from octavo.models import load_gguf
from octavo.models.generation import generate as continue_tokens
from octavo.quantization import load_calibration
from octavo.serving import ModelRunner
from octavo.serving import generate as serve_tokens
from octavo.training.config import MOST_SEED
from octavo.training.run_folder import TrainedRun, load_run

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["generate"]

CHUNK_TOKENS = 8
UNFINISHED = "\ufffd"  # what a character decodes to while some of its bytes are missing


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen."""

    temperature: float
    top_k: int | None
    generator: torch.Generator

    def arguments(self) -> dict[str, Any]:
        """As keyword arguments."""
        return {"temperature": self.temperature, "top_k": self.top_k, "generator": self.generator}


def generate(
    *,
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A run's folder, or a .gguf file.")],
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write.")] = 120,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample among the k likeliest only.")] = 40,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    calibration: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Means of keys, from calibrate --kv-cache; of a file's model.")
    ] = None,
) -> None:
    """Continue a prompt with a trained model."""
    if not 0 <= seed <= MOST_SEED:
        raise ConfigError(f"seed must be from 0 to {MOST_SEED}, not {seed}")
    sampling = Sampling(temperature, top_k, torch.Generator().manual_seed(seed))
    if model.suffix.lower() == ".gguf":
        text = _from_file(model, prompt, max_new_tokens, sampling, calibration)
    else:
        check_is_run(model)
        if calibration is not None:
            raise ConfigError("--calibration is for a .gguf file; a run's model keeps no keys: leave it out")
        text = _from_run(load_run(model), prompt, max_new_tokens, sampling)
    first = next(text, "")  # bad values are refused before anything is printed
    _write(prompt + first)
    for piece in text:
        _write(piece)
    _write("\n")


def _from_run(run: TrainedRun, prompt: str, count: int, sampling: Sampling) -> Iterator[str]:
    ids = run.tokenizer.encode(prompt, add_special_tokens=False).ids
    _check_prompt(prompt, ids)

    def new_tokens() -> Iterator[list[int]]:
        for start in range(0, max(count, 1), CHUNK_TOKENS):
            with run.surroundings:
                new = continue_tokens(
                    run.model,
                    ids,
                    max_new_tokens=min(CHUNK_TOKENS, count - start),
                    context=run.config.training.context,
                    **sampling.arguments(),
                )
            ids.extend(new)
            yield new

    return _as_text(run.tokenizer, new_tokens())


def _from_file(path: Path, prompt: str, count: int, sampling: Sampling, calibration: Path | None) -> Iterator[str]:
    loaded = load_gguf(path)
    ids = loaded.tokenizer.encode(prompt).ids
    _check_prompt(prompt, ids)
    means = None if calibration is None else load_calibration(calibration).means_of_keys(loaded.model)
    runner = ModelRunner(loaded.model, key_means=means)
    new = serve_tokens(runner, ids, max_new_tokens=count, stop_id=loaded.eos_id, **sampling.arguments())
    return _as_text(loaded.tokenizer, ([token] for token in new))


def _check_prompt(prompt: str, ids: list[int]) -> None:
    if not ids:
        raise ConfigError(f"the prompt {prompt!r} has no token to continue from; give some text")


def _as_text(tokenizer: "Tokenizer", new_tokens: Iterable[list[int]]) -> Iterator[str]:
    """Pieces of text as tokens come, whole characters only."""
    ids: list[int] = []
    written = 0
    for new in new_tokens:
        ids += new
        text = str(tokenizer.decode(ids)).rstrip(UNFINISHED)
        yield text[written:]
        written = len(text)


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()

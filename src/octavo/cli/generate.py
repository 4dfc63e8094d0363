"""``octavo generate``: text from a run, a GGUF file or a folder in FP8, printed as it is written.

A run's model computes as it was trained. A file's model is for generation only: its weights become FP8 codes. A folder
has codes already; where they have scales for blocks, or are no Llama's, every token is a pass over the whole text.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from torch import nn

from octavo.errors import ConfigError
from octavo.inference import ModelRunner
from octavo.inference import generate as serve_tokens
from octavo.interchange.tensor_files import read_json
from octavo.language_model import HF_CONFIG, load_language_model, logits_of
from octavo.models import Llama, load_gguf
from octavo.models.generation import generate as continue_tokens
from octavo.nn import Linear
from octavo.numerics import PerBlock
from octavo.quantization import load_calibration
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
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A run's folder, one in FP8, or a .gguf file.")],
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
    elif (model / HF_CONFIG).is_file():
        text = _from_folder(model, prompt, max_new_tokens, sampling, calibration)
    else:
        if calibration is not None:
            raise ConfigError("--calibration is not for a run, whose model keeps no keys; leave it out")
        text = _from_run(load_run(model), prompt, max_new_tokens, sampling)
    first = next(text, "")  # bad values are refused before anything is printed
    _write(prompt + first)
    for piece in text:
        _write(piece)
    _write("\n")


def _from_run(run: TrainedRun, prompt: str, count: int, sampling: Sampling) -> Iterator[str]:
    ids = run.tokenizer.encode(prompt, add_special_tokens=False).ids
    _check_prompt(prompt, ids)
    chunks = _in_chunks(run.model, ids, count, sampling, context=run.config.training.context, within=run.surroundings)
    return _as_text(run.tokenizer, chunks)


def _in_chunks(
    model: nn.Module,
    ids: list[int],
    count: int,
    sampling: Sampling,
    *,
    context: int,
    within: AbstractContextManager[object],
    stop_id: int | None = None,
) -> Iterator[list[int]]:
    """New tokens, a few at a time, each from a pass over all of them."""
    for start in range(0, max(count, 1), CHUNK_TOKENS):
        wanted = min(CHUNK_TOKENS, count - start)
        with within:
            new = continue_tokens(
                model, ids, max_new_tokens=wanted, context=context, stop_id=stop_id, **sampling.arguments()
            )
        ids.extend(new)
        yield new
        if len(new) < wanted:
            return


class Bare(nn.Module):
    """A language model as token ids → logits, whosever it is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[1, T] → [1, T, V]."""
        return logits_of(self.model, tokens)


def _from_folder(path: Path, prompt: str, count: int, sampling: Sampling, calibration: Path | None) -> Iterator[str]:
    loaded = load_language_model(path)
    ids = loaded.tokenizer.encode(prompt).ids
    _check_prompt(prompt, ids)
    ends = read_json(path / HF_CONFIG).get("eos_token_id")
    stop_id = ends if isinstance(ends, int) else None
    if isinstance(loaded.model, Llama) and not _has_blocks(loaded.model):
        runner = _runner(loaded.model, calibration)
        new = serve_tokens(runner, ids, max_new_tokens=count, stop_id=stop_id, **sampling.arguments())
        return _as_text(loaded.tokenizer, ([token] for token in new))
    if calibration is not None:
        raise ConfigError("--calibration is for models of the Llama layout, whose keys octavo keeps; leave it out")
    chunks = _in_chunks(
        Bare(loaded.model), ids, count, sampling, context=loaded.context, within=nullcontext(), stop_id=stop_id
    )
    return _as_text(loaded.tokenizer, chunks)


def _has_blocks(model: nn.Module) -> bool:
    held = (layer.held for layer in model.modules() if isinstance(layer, Linear))
    return any(each is not None and isinstance(each.granularity, PerBlock) for each in held)


def _from_file(path: Path, prompt: str, count: int, sampling: Sampling, calibration: Path | None) -> Iterator[str]:
    loaded = load_gguf(path)
    ids = loaded.tokenizer.encode(prompt).ids
    _check_prompt(prompt, ids)
    runner = _runner(loaded.model, calibration)
    new = serve_tokens(runner, ids, max_new_tokens=count, stop_id=loaded.eos_id, **sampling.arguments())
    return _as_text(loaded.tokenizer, ([token] for token in new))


def _runner(model: Llama, calibration: Path | None) -> ModelRunner:
    means = None if calibration is None else load_calibration(calibration).means_of_keys(model)
    return ModelRunner(model, key_means=means)


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

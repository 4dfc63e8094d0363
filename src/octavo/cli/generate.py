"""``octavo generate``: continue a prompt, printing text as it is generated.

A run's model computes as it was trained. Weights of a GGUF file are quantized to FP8; a folder in FP8 has codes, and
those of a layout that octavo serves are read with a cache.
Other models have no cache: each token takes a pass over the whole text.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from torch import nn

from octavo.checkpoints.tensor_files import read_json
from octavo.cli.console import stderr
from octavo.errors import ConfigError
from octavo.inference import ModelRunner
from octavo.inference.llama_layout import as_llama, why_not_llama
from octavo.inference.model_runner import ON_A_GPU
from octavo.inference.text_stream import TextStream
from octavo.language_model import LanguageModel, load_language_model
from octavo.models import FullPass, Llama
from octavo.models import generate as generate_tokens
from octavo.models.generation import TextModel
from octavo.models.sources import HF_CONFIG, SourceKind, kind_of
from octavo.nn import Linear
from octavo.quantization import load_calibration
from octavo.training.config import MOST_SEED, Device
from octavo.training.run_folder import load_run

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["generate"]


def generate(
    *,
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="A run's folder, a Hugging Face folder, in FP8 or not, or a .gguf file."),
    ],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 120,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample only from the k likeliest tokens.")] = 40,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder of octavo calibrate --kv-cache, for means of keys; not for a run."),
    ] = None,
) -> None:
    """Continue a prompt with a trained model."""
    if not 0 <= seed <= MOST_SEED:
        raise ConfigError(f"seed must be from 0 to {MOST_SEED}, not {seed}")
    if kind_of(model) is SourceKind.RUN:
        reader, tokenizer, ids = _load_run_model(model, prompt, calibration)
        stop_id = None
    else:
        loaded = load_language_model(model)
        tokenizer, ids, stop_id = loaded.tokenizer, loaded.tokenizer.encode(prompt).ids, _stop_id(loaded)
        reader = _as_text_model(loaded, calibration)
    if not ids:
        raise ConfigError(f"the prompt {prompt!r} has no token to continue; give some text")
    tokens = generate_tokens(
        reader,
        ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        generator=torch.Generator().manual_seed(seed),
        stop_id=stop_id,
    )
    text = _text_pieces(tokenizer, tokens)
    first = next(text)  # bad values are refused before anything is printed
    _write(prompt + first)
    for piece in text:
        _write(piece)
    _write("\n")


def _load_run_model(path: Path, prompt: str, calibration: Path | None) -> tuple[TextModel, "Tokenizer", list[int]]:
    """Load a run's model as trained; each token is a full pass, because recipes may scale by all tokens of a call."""
    if calibration is not None:
        raise ConfigError("--calibration does not apply to a run, whose model has no cache of keys; leave it out")
    run = load_run(path, device=Device.CPU)
    device = run.config.training.device
    if device is Device.CUDA or (device is Device.AUTO and torch.cuda.is_available()):
        stderr().print(f"this run trains on a GPU, but octavo generates on the CPU; {ON_A_GPU}", soft_wrap=True)
    ids = run.tokenizer.encode(prompt, add_special_tokens=False).ids
    return FullPass(run.model, context=run.config.training.context, within=run.surroundings), run.tokenizer, ids


def _as_text_model(loaded: LanguageModel, calibration: Path | None) -> TextModel:
    model: Any = loaded.model
    if isinstance(model, Llama) or (_has_codes(model) and why_not_llama(model.config) is None):
        means = None if calibration is None else load_calibration(calibration).means_of_keys(model)
        llama = model if isinstance(model, Llama) else as_llama(model, loaded.source)
        return ModelRunner(llama, key_means=means)
    if calibration is not None:
        raise ConfigError("--calibration needs a model of the Llama layout, whose keys octavo caches; leave it out")
    return FullPass(loaded.logits, context=loaded.context)


def _stop_id(loaded: LanguageModel) -> int | None:
    """Id of the end token named in a GGUF file or a folder's config.json; None without one."""
    path = Path(loaded.source) / HF_CONFIG
    end = read_json(path).get("eos_token_id") if path.is_file() else loaded.eos_id
    return end if isinstance(end, int) else None


def _has_codes(model: nn.Module) -> bool:
    return any(layer.codes_layout is not None for layer in model.modules() if isinstance(layer, Linear))


def _text_pieces(tokenizer: "Tokenizer", tokens: Iterable[int]) -> Iterator[str]:
    stream = TextStream(tokenizer)
    for token in tokens:
        yield stream.add(token)
    yield stream.finish()


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()

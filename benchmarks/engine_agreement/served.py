"""Runs that were trained as an engine serves: the trainer's log-probabilities against the engine's, over 10,000 tokens.

A run of ``octavo train --as-served-by`` on the built-in text is read back as evaluation reads it, and its weights are
run by :func:`octavo.engines.model_as`. For engines that serve, the run is exported as with ``--for`` and verified.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from octavo.engines import get, model_as
from octavo.engines.token_scores import text_log_probabilities
from octavo.export.checkpoint_writer import save_quantized
from octavo.export.engine_format import format_of_engine
from octavo.export.sources import ConversionOptions, load_source
from octavo.language_model import load_language_model
from octavo.quantization import text_windows
from octavo.text.corpus import Split
from octavo.text.sources import BUILTIN
from octavo.text.tokens import prepare
from octavo.training.config import DataConfig, RunConfig, TrainingConfig
from octavo.training.loop import train
from octavo.training.run_folder import load_run

__all__ = ["COLUMNS", "served_rows"]

ENGINES = {"vllm-token": "rowwise", "sglang-block": "blockwise", "te-current": "tensorwise"}  # and the gradients
STEPS, CONTEXT, TOKENS = 20, 128, 10_000
COLUMNS = ["engine", "gradients", "tokens", "equal log-probabilities", "largest difference", "the folder, read back"]


def served_rows() -> Iterator[tuple[str, ...]]:
    """Engine, gradients, tokens, equal ones, the largest difference, and the export's verification."""
    config = RunConfig(data=DataConfig(vocab_size=512))
    for engine, recipe in ENGINES.items():
        training = TrainingConfig(
            recipe=recipe, as_served_by=engine, steps=STEPS, batch_size=2, context=CONTEXT, eval_tokens=1024, warmup=5
        )
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "run"
            data = prepare(BUILTIN, Path(place) / "data", vocab_size=config.data.vocab_size)
            train(replace(config, training=training), folder, data=data)
            ours, theirs = log_probabilities_of(folder, engine)
            equal, largest = int((ours == theirs).sum()), float((ours - theirs).abs().max())
            yield engine, recipe, f"{len(ours):,}", f"{equal:,}", f"{largest:g}", exported(folder, engine)


@torch.no_grad()
def log_probabilities_of(folder: Path, engine: str) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the text's tokens, of the trainer and of octavo under the profile."""
    trained, plain = load_run(folder), load_language_model(folder)
    windows = text_windows(plain, BUILTIN, Split.TEST, count=-(-TOKENS // (CONTEXT - 1)), length=CONTEXT, seed=0)
    served, both = model_as(plain.model, get(engine)), []
    for window in windows:
        with trained.surroundings:
            logits = trained.model(window[None, :-1])[0]
        both.append([text_log_probabilities(each, window[1:]) for each in (logits, served(window[None, :-1])[0])])
    ours, theirs = (torch.cat(list(each)) for each in zip(*both, strict=True))
    return ours, theirs


def exported(folder: Path, engine: str) -> str:
    """Verification of the exported folder; "–" for an engine that reads none."""
    if engine.startswith("te-"):
        return "–"
    profile = get(engine)
    source = load_source(str(folder), format_of_engine(profile), ConversionOptions(engine=profile))
    saved = save_quantized(source.language_model, folder.parent / engine, format=format_of_engine(profile))
    assert saved.agreement is not None
    return f"{saved.reader}: layers {saved.agreement.logits_error:.1e}, end to end {saved.agreement.free_error:.1e}"

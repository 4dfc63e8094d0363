"""One FP8 folder in two readers: octavo, and transformers with compressed-tensors; what makes them differ.

The two differ in the decoder around the layers (norms, rotary positions and attention) and in the casts of inputs
(octavo divides the limit by an amax and multiplies by the quotient, compressed-tensors divides twice). Both are changed
one at a time. With compressed-tensors' casts octavo's layers give its outputs bit for bit
(tests/oracle/engines/test_compressed_tensors_model.py).
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import octavo
from benchmarks import smollm2
from benchmarks.engine_agreement.saved_steps import FOLDER, SavedSteps
from octavo import recipes
from octavo.checkpoints import load_quantized
from octavo.engines import EngineCopies, EngineModel, EngineProfile, agree, attribute, get, profile_of_recipe
from octavo.engines.agreement import nudge
from octavo.engines.summary import effect_cells
from octavo.engines.token_scores import text_log_probabilities
from octavo.experiments.intervals import student_interval
from octavo.export.checkpoint_writer import save_quantized
from octavo.language_model import from_quantized, logits_of
from octavo.nn import Linear
from octavo.nn.fp8_weight import store_codes
from octavo.quantization import text_windows
from octavo.quantization.bf16 import round_to_bf16
from octavo.quantization.comparison.evaluation_text import evaluation_windows

__all__ = ["COLUMNS", "KINDS", "cast_properties", "compare_readers", "folder_table"]

KINDS = ("dynamic", "static")
OURS, TRANSFORMERS = "octavo", "transformers with compressed-tensors"
COLUMNS = ["reader", "perplexity", "nats above octavo", "windows equal to octavo's", "to transformers'"]
LENGTH, CALIBRATION, SEEDS = 512, 16, (0, 1, 2)
ROW = recipes.get("rowwise", power_of_two=False)
THEIRS = {"dynamic": "compressed-tensors", "static": "compressed-tensors-static"}
Logits = Callable[[Tensor], Tensor]


def in_fp32(name: str) -> EngineProfile:
    """A profile as both readers run it: in FP32."""
    return replace(get(name), activations=torch.float32, output=torch.float32)


def written(kind: str) -> Path:
    """The folder, written once."""
    path = FOLDER / f"smollm2-{kind}"
    if path.is_dir():
        return path
    model = smollm2.load()
    if kind == "dynamic":
        round_to_bf16(model.model)
        octavo.convert(model.model, ROW)
    else:
        batches = text_windows(model, "library-sources", "train", count=CALIBRATION, length=LENGTH)
        octavo.calibrate(model, [window[None] for window in batches]).apply(model.model)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_quantized(model, path, verify_folder=False)
    return path


def read_by_transformers(folder: Path) -> nn.Module:
    """The folder as transformers with compressed-tensors reads it, in FP32."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    read: nn.Module = model.eval()
    return read


def with_codes(theirs: nn.Module, ours: nn.Module) -> nn.Module:
    """Transformers' decoder, whose linear layers are octavo's with the folder's codes."""
    from transformers import LlamaForCausalLM

    config: Any = copy.deepcopy(theirs.config)
    del config.quantization_config
    made: Any = LlamaForCausalLM(config)
    made.requires_grad_(False)
    made.load_state_dict(
        {name: value for name, value in theirs.state_dict().items() if "proj" not in name}, strict=False
    )
    for path, layer in ours.named_modules():
        codes = layer.stored_codes() if isinstance(layer, Linear) else None
        if isinstance(layer, Linear) and codes is not None:
            octavo.convert(made, layer.recipe, layer_filter=partial(_is_at, path))
            store_codes(made.get_submodule(path), codes)
            if layer.recipe.has_static_input:
                made.get_submodule(path).input_scale = layer.input_scale
    decoder: nn.Module = made.float().eval()
    return decoder


def _is_at(path: str, other: str, _: nn.Module) -> bool:
    return other == path


@contextmanager
def nudged(model: nn.Module, seed: int) -> Iterator[None]:
    """Change the last bits of a model's embeddings for a while."""
    embedding = next(module for module in model.modules() if isinstance(module, nn.Embedding))
    before = embedding.weight
    nudge(EngineModel(model, get("octavo-token")), seed)
    yield
    embedding.weight = before


@torch.no_grad()
def scores(logits: Logits, windows: Tensor, steps: SavedSteps, key: str) -> list[float]:
    """Mean negative log-likelihood of each window, one saved step each."""
    nats = []
    for index, window in enumerate(windows):

        def compute(window: Tensor = window) -> float:
            return -float(text_log_probabilities(logits(window[None, :-1])[0], window[1:]).mean())

        nats.append(steps.step(f"{key}/{index}", compute))
    return nats


def compare_readers(kind: str, count: int) -> dict[str, list[float]]:
    """Nats of every window for each reader and change, by name."""
    folder, steps = written(kind), SavedSteps(f"folder-{kind}")
    quantized = load_quantized(folder)
    ours, theirs = quantized.model, read_by_transformers(folder)
    windows = evaluation_windows(
        from_quantized(quantized, folder), "language-topics", "all", count=count, length=LENGTH
    )
    mixed, own = with_codes(theirs, ours), profile_of_recipe(next(iter(quantized.recipes.values())))
    engines = {
        "octavo's decoder, compressed-tensors' casts": EngineCopies(ours).of(in_fp32(THEIRS[kind])),
        "transformers' decoder, octavo's casts": EngineCopies(mixed).of(own),
        "transformers' decoder, compressed-tensors' casts": EngineCopies(mixed).of(in_fp32(THEIRS[kind])),
    }
    results = {OURS: scores(lambda t: logits_of(ours, t), windows, steps, "octavo")}
    results[TRANSFORMERS] = scores(lambda t: logits_of(theirs, t), windows, steps, "theirs")
    for name, engine in engines.items():
        results[name] = scores(engine, windows, steps, name)
    for seed in SEEDS:
        with nudged(ours, seed):
            key = f"octavo, other last bits {seed}"
            results[key] = scores(lambda t: logits_of(ours, t), windows, steps, key)
    return results


def cast_properties(kind: str) -> list[list[str]]:
    """Property of the two readers' casts, both values, and its effect on layers' outputs and KL alone, one window."""
    steps = SavedSteps(f"folder-{kind}")

    def compute() -> list[list[str]]:
        quantized = load_quantized(written(kind))
        model = from_quantized(quantized, written(kind))
        windows = evaluation_windows(model, "language-topics", "all", count=1, length=LENGTH)
        ours, theirs = profile_of_recipe(next(iter(quantized.recipes.values()))), in_fp32(THEIRS[kind])
        found = attribute(model, agree(model, ours, theirs, windows), windows)
        return [effect_cells(effect) for effect in found.effects if not effect.changes_nothing]

    rows: list[list[str]] = steps.step("properties", compute)
    return rows


def folder_table(results: dict[str, list[float]]) -> list[list[str]]:
    """Name, perplexity, nats above octavo's reading with the interval over windows, windows equal to both readers'."""
    base, rows = results[OURS], []
    for name, nats in results.items():
        gap = student_interval([each - own for each, own in zip(nats, base, strict=True)])
        perplexity = math.exp(sum(nats) / len(nats))
        shown = "" if name == OURS else f"{gap.estimate:+.5f} ± {gap.half_width:.5f}"
        equal = (f"{sum(a == b for a, b in zip(nats, results[other], strict=True))}" for other in (OURS, TRANSFORMERS))
        rows.append([name, f"{perplexity:.4f}", shown, *equal])
    return rows

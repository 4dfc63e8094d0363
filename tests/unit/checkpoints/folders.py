"""Small models in every format, and what to break in their folders."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import octavo
from octavo import recipes
from octavo.checksums import SUMS
from octavo.export.checkpoint_writer import SavedCheckpoint, save_quantized
from octavo.export.lockstep import LockstepAgreement
from octavo.language_model import LanguageModel
from octavo.nn import Linear
from octavo.recipes import Recipe
from tests.unit.quantization.tiny_models import language_model, windows

ROW = recipes.get("rowwise", power_of_two=False)
LAYER = "model.layers.0.self_attn.q_proj"
DYNAMIC: dict[str, tuple[str, str | Recipe]] = {
    "rows": ("compressed-tensors", ROW),
    "tensors": ("compressed-tensors", "tensorwise"),
    "weights": ("compressed-tensors", "weight_only"),
    "blocks": ("hf-fp8", "blockwise"),
    "own rows": ("octavo", "rowwise"),
    "own groups": ("octavo", "mxfp8"),
}


def dynamic(recipe: str | Recipe) -> LanguageModel:
    """A tiny model that runs a recipe."""
    model = language_model()
    octavo.convert(model.model, recipe)
    return model


def static(granularity: str = "tensor", *, kv_cache: bool = False, power_of_two: bool = False):
    """A tiny model with static inputs, and its scales of keys and values."""
    model = language_model()
    found = octavo.calibrate(model, [windows()], granularity=granularity, kv_cache=kv_cache, power_of_two=power_of_two)
    found.apply(model)
    return model, found.kv_scales


def layer_of(model: nn.Module, path: str) -> Linear:
    """A converted layer."""
    found = model.get_submodule(path)
    assert isinstance(found, Linear)
    return found


def verdict(saved: SavedCheckpoint) -> LockstepAgreement:
    """What the verification found."""
    assert saved.agreement is not None
    return saved.agreement


def written(folder: Path, name: str) -> LanguageModel:
    """A folder of that kind, and the model that it was written from."""
    if name in DYNAMIC:
        fmt, recipe = DYNAMIC[name]
        model, scales = dynamic(recipe), {}
    else:
        fmt = "modelopt" if name == "modelopt" else "compressed-tensors"
        model, scales = static(kv_cache=True)
    save_quantized(model, folder, format=fmt, kv_scales=scales, verify_folder=False)
    return model


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Rewrite model.safetensors, as a tool would that writes no checksums."""
    (folder / SUMS).unlink(missing_ok=True)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_config(folder: Path, change: Callable[[dict], object]) -> None:
    """Rewrite quantization_config, as a tool would that writes no checksums."""
    (folder / SUMS).unlink(missing_ok=True)
    record = json.loads((folder / "config.json").read_text())
    change(record["quantization_config"])
    (folder / "config.json").write_text(json.dumps(record))

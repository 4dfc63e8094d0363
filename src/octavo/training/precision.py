"""Precision of a run's model: conversion of its layers, autocast around them, and device.

| recipe          | linears                       | attention, norms, embedding, head | parameters and optimizer |
|-----------------|-------------------------------|-----------------------------------|--------------------------|
| fp32            | FP32                          | FP32                              | FP32                     |
| bf16            | BF16 operands and results     | bf16 autocast                     | FP32                     |
| an FP8 recipe   | as the recipe says            | bf16 or fp16 autocast, or FP32    | FP32                     |
| … as served by  | the engine's forward, the     | the engine's dtype, parameters    | FP32                     |
| an engine       | recipe's gradients            | rounded to it                     |                          |

Under autocast every linear becomes an ``octavo.nn.Linear`` with octavo's "bf16" recipe: the results are equal, but on a
CPU without BF16 instructions the GEMMs run in FP32 on BF16 operands, several times faster than torch's own. The same
holds for the linears of an FP8 run in a BF16 phase (see :mod:`octavo.training.precision_schedule`).
"""

from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase

import torch
from torch import nn

from octavo import recipes
from octavo.convert import ConversionReport, convert
from octavo.errors import ConfigError
from octavo.models.llama import MLP
from octavo.models.served_forward import served_forward
from octavo.nn import Linear, RMSNorm
from octavo.nn.scaling_state import accept_new_histories
from octavo.recipes import Recipe
from octavo.recipes.engines import get, served_recipe
from octavo.training.config import Device, Precision, TrainingConfig
from octavo.training.recipe_choice import BF16

__all__ = ["apply_recipe", "layer_recipe", "recipe_named", "resolve_device", "surroundings"]


def resolve_device(device: Device) -> torch.device:
    """Return the torch device of a run.

    Raises:
        ConfigError: CUDA is requested but not available.
    """
    has_cuda = torch.cuda.is_available()
    if device == Device.CUDA and not has_cuda:
        raise ConfigError("device 'cuda' is not available: torch sees no CUDA device; use 'cpu' or 'auto'")
    return torch.device("cuda" if has_cuda and device != Device.CPU else "cpu")


def apply_recipe(model: nn.Module, training: TrainingConfig, *, step: int = 1) -> ConversionReport | None:
    """Convert the linears to the recipe of a step, in place; return None for FP32 without conversion.

    May be called again with other settings or for another phase; a delayed layer keeps its history if its recipe stays
    the same. Delayed recipes update their scales manually: the loop accumulates gradients and calls
    ``octavo.update_scales``.
    """
    report, name = None, training.recipe_at(step)
    if training.is_fp8:
        overrides = {pattern: BF16 if name == BF16 else other for pattern, other in training.overrides.items()}
        report = convert(
            model,
            recipe_named(name, training),
            skip=training.skip,
            convert_head=training.convert_head,
            overrides={pattern: recipe_named(other, training) for pattern, other in overrides.items()},
            scale_updates="manual",
            cache_weights=training.cache_weights,
        )
    for module in model.modules():
        if isinstance(module, Linear):
            module.trained_recipe = None  # metrics.jsonl records the recipes of phases
    _change_modules(model, training, recipe_named(name, training) if report else recipes.get(BF16))
    accept_new_histories(model)  # a phase begins with them, and checkpoints have those of a phase that goes on
    plain = _leave_rest_plain(model, training, converted=(*report.converted, *report.weights) if report else ())
    return report or plain


def _change_modules(model: nn.Module, training: TrainingConfig, recipe: Recipe) -> None:
    """Smooth the MLPs of FP8 layers, and cast norms' weights as the recipe casts those of linears, if configured."""
    for module in model.modules():
        if isinstance(module, MLP):
            module.is_smooth = training.smooth_swiglu and not recipe.is_high_precision
        if isinstance(module, RMSNorm):
            module.weight_cast = recipe.output.b if training.cast_norms else None


def layer_recipe(path: str, training: TrainingConfig, *, step: int = 1) -> Recipe:
    """Recipe of the layer at ``path`` in a step, if :func:`apply_recipe` converts it."""
    if any(fnmatchcase(path, pattern) for pattern in training.skip):
        return recipes.get(BF16)
    name = training.recipe_at(step)
    matching = (other for pattern, other in training.overrides.items() if fnmatchcase(path, pattern))
    return recipe_named(name if name == BF16 else next(matching, name), training)


def recipe_named(name: str, training: TrainingConfig) -> Recipe:
    """Return a preset, with the run's options if it is the run's own recipe, and the engine's forward pass in FP8."""
    recipe = recipes.get(name, **(training.recipe_options if name == training.recipe else {}))
    is_served = training.as_served_by and not recipe.is_high_precision
    return served_recipe(get(training.as_served_by), recipe) if is_served else recipe


def _leave_rest_plain(
    model: nn.Module, training: TrainingConfig, *, converted: tuple[str, ...]
) -> ConversionReport | None:
    """Convert all other linears under autocast, or those that were FP8 before, to the surrounding precision."""
    everywhere = training.surrounding != Precision.FP32

    def is_remaining(path: str, layer: nn.Linear) -> bool:
        return path not in converted and (everywhere or isinstance(layer, Linear))

    return convert(model, BF16, convert_head=True, layer_filter=is_remaining) if everywhere or converted else None


def surroundings(training: TrainingConfig, device: torch.device, model: nn.Module) -> AbstractContextManager[object]:
    """Return the reusable context of a model's forward and loss."""
    if training.as_served_by:
        return served_forward(model, get(training.as_served_by))
    if training.surrounding == Precision.FP32:
        return nullcontext()
    dtype = torch.float16 if training.surrounding == Precision.FP16 else torch.bfloat16
    # The cache would hold a BF16 copy of every weight until the block ends.
    return torch.autocast(device.type, dtype=dtype, cache_enabled=False)

"""What a run's recipe means for a model: which layers are converted, what surrounds them, and where it computes.

| recipe          | linears                       | attention, norms, embedding, head | parameters and optimizer |
|-----------------|-------------------------------|-----------------------------------|--------------------------|
| fp32            | FP32                          | FP32                              | FP32                     |
| bf16            | BF16 operands and results     | bf16 autocast                     | FP32                     |
| an FP8 recipe   | as the recipe says            | bf16 or fp16 autocast, or FP32    | FP32                     |

Under autocast every linear becomes an ``octavo.nn.Linear`` first, with octavo's "bf16" recipe: the same numbers, but
on a CPU without BF16 instructions the products are taken in FP32 from BF16 operands, several times faster than
torch's own. In a phase of BF16 (see :mod:`octavo.training.precision_schedule`) the linears of an FP8 run are such too.
"""

from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase

import torch
from torch import nn

from octavo import recipes
from octavo.convert import ConversionReport, convert
from octavo.errors import ConfigError
from octavo.nn import Linear
from octavo.recipes import Recipe
from octavo.training.config import Device, Precision, TrainingConfig
from octavo.training.recipe_choice import BF16

__all__ = ["apply_recipe", "layer_recipe", "resolve_device", "surroundings"]


def resolve_device(device: Device) -> torch.device:
    """The torch device of a run.

    Raises:
        ConfigError: CUDA is asked for and there is none.
    """
    has_cuda = torch.cuda.is_available()
    if device == Device.CUDA and not has_cuda:
        raise ConfigError("the device is to be 'cuda', but torch sees no CUDA device; use 'cpu' or 'auto'")
    return torch.device("cuda" if has_cuda and device != Device.CPU else "cpu")


def apply_recipe(model: nn.Module, training: TrainingConfig, *, step: int = 1) -> ConversionReport | None:
    """Convert the linears as the recipe of a step says, in place; None for plain FP32.

    May be called again with other settings or for another phase: a delayed layer keeps its history where its recipe's
    is the same. Delayed recipes close their steps by hand: the loop accumulates gradients and calls
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
            module.trained_recipe = None  # a phase's recipe has a line of its own in the run's metrics
    plain = _leave_rest_plain(model, training, taken=report.converted if report else ())
    return report or plain


def layer_recipe(path: str, training: TrainingConfig, *, step: int = 1) -> Recipe:
    """What :func:`apply_recipe` lets the layer at ``path`` run in a step, if it converts it."""
    if any(fnmatchcase(path, pattern) for pattern in training.skip):
        return recipes.get(BF16)
    name = training.recipe_at(step)
    own = (other for pattern, other in training.overrides.items() if fnmatchcase(path, pattern))
    return recipe_named(name if name == BF16 else next(own, name), training)


def recipe_named(name: str, training: TrainingConfig) -> Recipe:
    """A preset, with the run's options if it is the run's own."""
    return recipes.get(name, **(training.recipe_options if name == training.recipe else {}))


def _leave_rest_plain(model: nn.Module, training: TrainingConfig, *, taken: tuple[str, ...]) -> ConversionReport | None:
    """Let every other linear run in what surrounds it: all of them under autocast, once FP8 ones elsewhere."""
    everywhere = training.surrounding != Precision.FP32

    def is_rest(path: str, layer: nn.Linear) -> bool:
        return path not in taken and (everywhere or isinstance(layer, Linear))

    return convert(model, BF16, convert_head=True, layer_filter=is_rest) if everywhere or taken else None


def surroundings(training: TrainingConfig, device: torch.device) -> AbstractContextManager[object]:
    """The context that forward and loss run in; may be entered again and again."""
    if training.surrounding == Precision.FP32:
        return nullcontext()
    dtype = torch.float16 if training.surrounding == Precision.FP16 else torch.bfloat16
    # The cache of cast weights would keep every weight in BF16 beside its FP32 original until the block ends.
    return torch.autocast(device.type, dtype=dtype, cache_enabled=False)

"""Transformer Engine's context managers for FP8, and its ``checkpoint``."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import distributed
from torch.utils import checkpoint as torch_checkpoint

import octavo
from octavo.compat.transformer_engine.common.recipe import Recipe
from octavo.compat.transformer_engine.pytorch.arguments import check_others
from octavo.compat.transformer_engine.pytorch.availability import get_default_recipe
from octavo.compat.transformer_engine.pytorch.blocks import Block

__all__ = ["autocast", "checkpoint", "fp8_autocast", "fp8_model_init", "quantized_model_init"]


@contextmanager
def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Recipe | None = None,
    amax_reduction_group: Any = None,
) -> Iterator[None]:
    """Run octavo's layers inside with ``recipe``.

    Args:
        enabled: False runs them in high precision.
        calibrating: if not enabled, record the amaxes of inputs and weights for the scales of a later block with the
            same delayed recipe; leaving the block ends a step of each layer that ran.
        recipe: None is ``DelayedScaling()``.
        amax_reduction_group: process group over which amaxes are reduced to the largest; None is the default group.

    Example:
        >>> from octavo.compat.transformer_engine.pytorch import Linear
        >>> layer = Linear(4, 4)
        >>> with autocast():
        ...     layer(torch.ones(1, 4)).sum().backward()
    """
    block = Block(
        enabled=enabled,
        calibrating=calibrating,
        recipe=_checked(recipe) or get_default_recipe(),
        group=_checked_group(amax_reduction_group),
    )
    with block.entered(), octavo.autocast(block.recipe.octavo_recipe(), enabled=enabled):
        yield


@contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
) -> Iterator[None]:
    """Older name of :func:`autocast`, with its older arguments.

    Example:
        >>> from octavo.compat.transformer_engine.pytorch import Linear
        >>> with fp8_autocast(enabled=True):
        ...     y = Linear(4, 4)(torch.ones(1, 4))
    """
    with autocast(enabled, calibrating, fp8_recipe, fp8_group):
        yield


@contextmanager
def quantized_model_init(enabled: bool = True, recipe: Recipe | None = None, **others: Any) -> Iterator[None]:
    """Build modules with weights in high precision; warn if FP8 weights are requested.

    Args:
        enabled: whether weights as FP8 codes are requested.
        recipe: recipe of the codes.
        others: ``preserve_high_precision_init_val`` has no effect: the parameter itself has that value.

    Example:
        >>> with quantized_model_init(enabled=False):
        ...     layer = octavo.compat.transformer_engine.pytorch.Linear(4, 4)
    """
    check_others("quantized_model_init", others)
    _checked(recipe)
    if enabled:
        warnings.warn(
            "octavo trains weights in high precision; store frozen weights as FP8 codes, one byte per element, with "
            'octavo.convert(model, frozen="fp8")',
            stacklevel=3,
        )
    yield


fp8_model_init = quantized_model_init


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Recompute ``function`` in the backward pass instead of saving its activations.

    Uses torch's non-reentrant checkpointing, which gives the same bits as the reentrant one.

    Args:
        function: function to call.
        args: its arguments.
        kwargs: its keyword arguments; ``use_reentrant``, ``tp_group``, ``get_rng_state_tracker`` and
            ``distribute_saved_activations`` are checked and not passed on.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> checkpoint(torch.exp, x).sum().backward()
        >>> torch.equal(x.grad, x.exp())
        True
    """
    options = {name: kwargs.pop(name) for name in _CHECKPOINT_OPTIONS if name in kwargs}
    check_others("checkpoint", options)
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


_CHECKPOINT_OPTIONS = ("distribute_saved_activations", "get_rng_state_tracker", "tp_group", "use_reentrant")


def _checked(recipe: Recipe | None) -> Recipe | None:
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(f"a recipe must be one of octavo.compat.transformer_engine.common.recipe, not {recipe!r}")
    return recipe


def _checked_group(group: Any) -> Any:
    if group is not None and not (distributed.is_available() and isinstance(group, distributed.ProcessGroup)):
        raise TypeError(f"a group to reduce amaxes in is a torch.distributed.ProcessGroup or None, not {group!r}")
    return group

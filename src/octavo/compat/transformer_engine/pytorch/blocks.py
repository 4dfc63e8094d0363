"""Autocast blocks: the process group that reduces amaxes, and calibration.

Both apply to the layers that run inside a block. A global forward hook tracks them, only for blocks that need it and
until the block ends. Layers on other threads are ignored.

- **Group.** A layer's step ends over the group of the last block it ran in. A block without a group restores the
  layer's original group.
- **Calibration.** A block that is calibrating but not enabled computes in high precision. It records the amaxes of
  inputs and weights as FP8 would, also in evaluation mode, and its end closes the step.
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from octavo import nn as octavo_nn
from octavo.autocast import autocast_region
from octavo.compat.transformer_engine.common.recipe import DelayedScaling, Recipe
from octavo.errors import ConfigError
from octavo.nn.scaled_layer import autocast_dtype
from octavo.numerics import PerTensor, measure
from octavo.recipes import History
from octavo.scaling import INPUT, WEIGHT, AmaxHistory, ScaleUpdates
from octavo.scaling.rank_reduction import default_group
from octavo.scaling.scale_updates import close_block_over_ranks, close_over_ranks

__all__ = ["Block", "active_block"]


class _Blocks(threading.local):
    """Active blocks of each thread, innermost last."""

    def __init__(self) -> None:
        self.stack: list[Block] = []


_blocks = _Blocks()
_first_groups: "weakref.WeakKeyDictionary[ScaleUpdates, Any]" = weakref.WeakKeyDictionary()  # original groups


@dataclass(eq=False, slots=True, kw_only=True)
class Block:
    """``autocast`` block.

    Attributes:
        enabled: whether layers run in FP8.
        calibrating: whether layers record amaxes if not enabled.
        recipe: recipe of the block.
        group: process group that reduces amaxes; None is the default group.
        recorded: layers that recorded amaxes.
    """

    enabled: bool
    calibrating: bool
    recipe: Recipe
    group: Any
    recorded: list[octavo_nn.Linear] = field(default_factory=list, init=False)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make this the thread's innermost block."""
        _blocks.stack.append(self)
        before_forward = self._before_forward(threading.get_ident())
        hook = register_module_forward_pre_hook(before_forward) if self._needs_hook else None
        try:
            yield
        finally:
            _blocks.stack.pop()
            if hook is not None:
                hook.remove()
            close_over_ranks([layer for layer in self.recorded if not layer.scale_updates.manual])

    @property
    def _needs_hook(self) -> bool:
        if not isinstance(self.recipe, DelayedScaling):
            return False
        names_group = self.group is not None or not self.recipe.reduce_amax
        return self._calibrates or (default_group() is not None and (names_group or bool(_first_groups)))

    @property
    def _calibrates(self) -> bool:
        return self.calibrating and not self.enabled

    def _before_forward(self, thread: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if isinstance(module, octavo_nn.Linear) and _is_innermost(self, thread):
                self._set_group(module)
                if self._calibrates:
                    self._record(module, args[0])

        return hook

    def _set_group(self, layer: octavo_nn.Linear) -> None:
        assert isinstance(self.recipe, DelayedScaling)
        updates = layer.scale_updates
        group = self.group if self.recipe.reduce_amax else "rank"
        if group is None:
            group = _first_groups.get(updates, updates.group)
        if group != updates.group:
            close_block_over_ranks(layer, autocast_region())  # end the previous step over its own group
            _first_groups.setdefault(updates, updates.group)
            updates.group = group

    @torch.no_grad()
    def _record(self, layer: octavo_nn.Linear, x: torch.Tensor) -> None:
        spec = self.recipe.octavo_recipe().history
        assert spec is not None
        history = _history(layer, spec)
        if layer not in self.recorded:
            close_block_over_ranks(layer, autocast_region())  # an earlier block's record is a separate step
            history.begin_forward(autocast_region())
            self.recorded.append(layer)
        history.record(INPUT, measure(x.to(autocast_dtype(x)), PerTensor()).amax)
        if layer.codes_layout is None and layer.records_weight:
            history.record(WEIGHT, measure(layer.weight, PerTensor()).amax)


def active_block() -> Block | None:
    """Innermost block of this thread; None outside all blocks."""
    return _blocks.stack[-1] if _blocks.stack else None


def _is_innermost(block: Block, thread: int) -> bool:
    return threading.get_ident() == thread and active_block() is block


def _history(layer: octavo_nn.Linear, spec: History) -> AmaxHistory:
    if layer.amax_history is None:
        layer.keep_history(layer.new_history(spec))
    history = layer.amax_history
    assert history is not None
    if history.spec != spec:
        raise ConfigError(
            f"this layer keeps a history for {history.spec} and cannot also be calibrated for {spec}; use one delayed "
            "recipe"
        )
    return history

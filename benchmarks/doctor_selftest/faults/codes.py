"""Codes and sums that are not those of their tensors: a stale cache, a second rounding, biased sums."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.doctor_selftest.faults.fault import Fault
from benchmarks.doctor_selftest.faults.workloads import block_of, layer_at
from benchmarks.doctor_selftest.faults.wrong_casts import requantizing
from octavo import recipes
from octavo.doctor import watch
from octavo.functional import WeightCache, WeightOperands
from octavo.nn import Linear
from octavo.recipes import Recipe
from octavo.scaling import ROLES, WEIGHT, OperandScaling
from octavo.training.loop import Trainer

__all__ = ["CODE_FAULTS"]

UP = "mlp.up_proj"
REPEATS = 16  # of the pooled input: K is so many times the hidden size


class _StaleCache(WeightCache):
    """Weight cache that ignores changes of the weight and cannot be emptied."""

    def operands(self, weight: Tensor, recipe: Recipe, tap: OperandScaling, *, learning: bool) -> WeightOperands | None:
        if self._operands is None or self._operands._recipe != recipe:  # noqa: SLF001
            return super().operands(weight, recipe, tap, learning=learning)
        return self._operands

    def clear(self) -> None:
        """Keep them."""


@contextmanager
def _stale_caches(trainer: Trainer, layer: int) -> Iterator[None]:
    """Make the weight caches of a block ignore changes of their weights."""
    with ExitStack() as stack:
        for module in block_of(trainer, layer).modules():
            if isinstance(module, Linear) and module.weight_cache is not None:
                stack.enter_context(mock.patch.object(module, "weight_cache", _StaleCache()))
        yield


@contextmanager
def _requantized(trainer: Trainer, layer: int) -> Iterator[None]:
    """A weight's operand for grad_input is made from the codes of its operand for output.

    Powers of two leave most codes' digits as they are; but rounding moves amaxes, and with them some scales twofold.
    """
    with requantizing(layer_at(trainer, layer, UP), WEIGHT):
        yield


@contextmanager
def _pooled(trainer: Trainer, layer: int) -> Iterator[None]:
    """Make a layer sum many products of one sign as a tensor core does."""
    mlp = block_of(trainer, layer).mlp
    recipe = recipes.get("tensorwise", emulate_tensor_cores=True)
    width = REPEATS * trainer.config.model.hidden_size
    mlp.pool = Linear(width, trainer.config.model.hidden_size, bias=False, recipe=recipe, manual_scale_updates=True)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(layer)
        mlp.pool.weight.copy_(torch.rand(mlp.pool.weight.shape, generator=generator) + 0.5)
    mlp.pool.requires_grad_(False)

    def add_bias(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        x = inputs[0].detach().float().abs().repeat(1, 1, REPEATS) / width
        with torch.autocast(x.device.type, enabled=False):
            added: Tensor = mlp.pool(x) - torch.nn.functional.linear(x, mlp.pool.weight)
        return output + added.to(output.dtype)

    handle = mlp.register_forward_hook(add_bias)
    watcher = trainer.watcher
    trainer.watcher = watch(trainer.model, trainer.optimizer, interval=trainer.training.statistics_interval)
    try:
        yield
    finally:
        handle.remove()
        trainer.watcher = watcher
        del mlp.pool


CODE_FAULTS = (
    Fault(
        name="stale weight cache",
        story="a block multiplies codes of weights that have changed since",
        code="stale-weight",
        places=("model.layers.{layer}.*",),
        role=ROLES[WEIGHT],
        training={"cache_weights": True},
        inject=_stale_caches,
    ),
    Fault(
        name="requantized transpose",
        story="a weight's transpose is quantized from codes that are rounded already",
        code="inexact-amax",
        places=("model.layers.{layer}." + UP,),
        role=ROLES[WEIGHT],
        also=frozenset({"stale-weight"}),
        training={"recipe": "rowwise"},
        inject=_requantized,
    ),
    Fault(
        name="biased accumulation",
        story="a layer sums thousands of products of one sign in one chain of a tensor core",
        code="biased-accumulation",
        places=("model.layers.{layer}.mlp.pool",),
        inject=_pooled,
        is_remediable=False,
    ),
)

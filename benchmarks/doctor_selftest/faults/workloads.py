"""Workloads that expose faults: scaled rows that leave a layer's function as it is, and hooks that follow the steps."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.doctor_selftest.faults.fault import Injection
from octavo.nn import Linear
from octavo.training.loop import Trainer

__all__ = [
    "alternating",
    "block_of",
    "growing",
    "jumping",
    "larger",
    "layer_at",
    "linear_at",
    "log_normal_gradients",
    "padded",
]

Factor = Callable[[Trainer, int, Tensor], Tensor | float]


def block_of(trainer: Trainer, layer: int) -> Any:
    """The decoder's block number ``layer``."""
    return trainer.model.model.layers[layer]


def linear_at(trainer: Trainer, layer: int, name: str) -> nn.Linear:
    """A linear layer of a block, such as "mlp.down_proj"."""
    found = block_of(trainer, layer).get_submodule(name)
    assert isinstance(found, nn.Linear), name
    return found


def layer_at(trainer: Trainer, layer: int, name: str) -> Linear:
    """The same of a model that is converted."""
    found = linear_at(trainer, layer, name)
    assert isinstance(found, Linear), name
    return found


def growing(name: str, *, binades_a_step: float) -> Injection:
    """A layer's input grows from step to step, as activations do in long runs, at many times their speed."""
    return _scaled(name, lambda trainer, began, _: 2.0 ** (binades_a_step * (trainer.step - began)))


def jumping(name: str, *, binades: int, after: int) -> Injection:
    """One batch's activations are far larger than all others'."""
    return _scaled(name, lambda trainer, began, _: 2.0**binades if trainer.step == began + after else 1.0)


def alternating(name: str, *, binades: int) -> Injection:
    """Every other batch's activations are larger, such as those of two data sources taken in turn."""
    return _scaled(name, lambda trainer, began, _: 2.0 ** (binades * ((trainer.step - began) % 2)))


def larger(name: str, *, binades: int) -> Injection:
    """All activations are larger, such as those of another data source."""
    return _scaled(name, lambda *_: 2.0**binades)


def padded(name: str, *, tokens: int, binades: int) -> Injection:
    """The first positions of every sequence are padding, whose activations are far larger than the text's."""

    def factor(_trainer: Trainer, _began: int, x: Tensor) -> Tensor:
        position = torch.arange(x.shape[-2], device=x.device)
        return torch.where(position < tokens, 2.0**binades, 1.0)[:, None]

    return _scaled(name, factor)


def _scaled(name: str, factor: Factor) -> Injection:
    """Multiply a layer's input by a power of two or nearly so, and its output by the reciprocal: nothing changes.

    In evaluation the layer is left alone: it has to do with training.
    """

    @contextmanager
    def scaling(trainer: Trainer, layer: int) -> Iterator[None]:
        module, began = linear_at(trainer, layer, name), trainer.step

        def grow(module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor | None:
            return inputs[0] * factor(trainer, began, inputs[0]) if module.training else None

        def shrink(module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            return output / factor(trainer, began, output) if module.training else None

        handles = [module.register_forward_pre_hook(grow), module.register_forward_hook(shrink)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    return scaling


def log_normal_gradients(name: str, *, sigma: float) -> Injection:
    """Every token's gradient at a layer's output is weighted by exp(sigma · n), n normal, of unit mean square.

    So it is where tokens are weighted by rewards or by importance, and where most of them are predicted well.
    """

    @contextmanager
    def weighting(trainer: Trainer, layer: int) -> Iterator[None]:
        def weigh(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda gradient: gradient * _weights(gradient, sigma, seed=trainer.step))

        handle = linear_at(trainer, layer, name).register_forward_hook(weigh)
        try:
            yield
        finally:
            handle.remove()

    return weighting


def _weights(gradient: Tensor, sigma: float, *, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(gradient.shape[:-1], generator=generator).to(gradient.device)
    weights = torch.exp(sigma * normal)
    return (weights / weights.square().mean().sqrt()).clamp(min=math.exp(-30))[..., None].to(gradient.dtype)

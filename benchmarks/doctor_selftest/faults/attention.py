"""Faults of attention in FP8: keys whose differences its steps hide, gradients that become zero under one scale."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.doctor_selftest.faults.fault import Fault, Injection
from benchmarks.doctor_selftest.faults.workloads import block_of, linear_at
from octavo.doctor import watch
from octavo.nn import DotProductAttention
from octavo.training.loop import Trainer

__all__ = ["ATTENTION_FAULTS"]

QUERY = "self_attn.q_proj"


def _larger_logits(factor: float) -> Injection:
    """A block's queries, and with them its logits, are larger, as after a long run without a norm of them."""

    @contextmanager
    def enlarging(trainer: Trainer, layer: int) -> Iterator[None]:
        def enlarge(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
            return output * factor

        handle = linear_at(trainer, layer, QUERY).register_forward_hook(enlarge)
        try:
            yield
        finally:
            handle.remove()

    return enlarging


def _keys_with_common_part(factor: float) -> Injection:
    """All keys of a block have a part in common: logits grow, and their softmax does not change.

    Args:
        factor: the part's elements over the keys' rms.
    """

    @contextmanager
    def adding(trainer: Trainer, layer: int) -> Iterator[None]:
        def add(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            *others, attend = inputs

            def attend_with_part(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
                generator = torch.Generator().manual_seed(layer)
                signs = torch.randn(keys.shape[-2:], generator=generator).sign().to(keys)
                attended: Tensor = attend(queries, keys + factor * keys.detach().square().mean().sqrt() * signs, values)
                return attended

            return (*others, attend_with_part)

        handle = block_of(trainer, layer).self_attn.register_forward_pre_hook(add)
        try:
            yield
        finally:
            handle.remove()

    return adding


@contextmanager
def _in_fp8(trainer: Trainer, layer: int) -> Iterator[None]:
    """A block's attention runs in FP8, with one scale a head."""
    attention = block_of(trainer, layer).self_attn
    attention.dot_product = DotProductAttention(recipe="tensorwise")

    def replace(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*inputs[:3], module.dot_product)

    handle = attention.register_forward_pre_hook(replace, prepend=True)  # the workload's hook wraps it
    watcher = trainer.watcher
    trainer.watcher = watch(trainer.model, trainer.optimizer, interval=trainer.training.statistics_interval)
    try:
        yield
    finally:
        handle.remove()
        trainer.watcher = watcher
        del attention.dot_product


ATTENTION_FAULTS = (
    Fault(
        name="common part of keys",
        story="attention runs in FP8, whose steps are as large as the differences of keys with a large part in common",
        code="attention-logits",
        places=("model.layers.{layer}.self_attn.dot_product",),
        workload=_keys_with_common_part(128.0),
        inject=_in_fp8,
        is_remediable=False,
    ),
    Fault(
        name="scores under one scale",
        story="gradients of attention's scores, most of them far below the largest, have one scale a head",
        code="attention-gradient",
        places=("model.layers.{layer}.self_attn.dot_product",),
        also=frozenset({"attention-logits", "gradient-underflow"}),  # a softmax of large logits has few gradients
        workload=_larger_logits(256.0),
        inject=_in_fp8,
        is_remediable=False,
    ),
)

"""Faults in values: infinite, too small, zero, cancelling."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from benchmarks.doctor_selftest.faults.fault import Fault
from benchmarks.doctor_selftest.faults.workloads import block_of, linear_at, log_normal_gradients
from octavo import recipes
from octavo.doctor import Watcher, watch
from octavo.formats import E4M3
from octavo.nn import Linear
from octavo.recipes import GemmSpec, Recipe
from octavo.scaling import GRAD_OUTPUT, ROLES
from octavo.training.loop import Trainer

__all__ = ["VALUE_FAULTS", "add_adapter"]

STRIKES_AFTER = 12  # steps
RANK = 16  # of the low-rank adapter
NOISE = 300.0  # size of a cancelling gradient over that of the true one
DOWN = "mlp.down_proj"


@contextmanager
def _infinite_activation(trainer: Trainer, layer: int) -> Iterator[None]:
    """One element of a norm's output becomes infinite at one step."""
    began = trainer.step

    def break_one(module: nn.Module, _inputs: object, output: Tensor) -> Tensor | None:
        if trainer.step != began + STRIKES_AFTER or not module.training:
            return None
        broken = output.clone()
        broken[0, -1, 0] = math.inf
        return broken

    handle = block_of(trainer, layer).post_attention_layernorm.register_forward_hook(break_one)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _broken_gradient(trainer: Trainer, layer: int) -> Iterator[None]:
    """One element of the gradient at a layer's output becomes NaN at one step."""
    began = trainer.step

    def break_one(gradient: Tensor) -> Tensor | None:
        if trainer.step != began + STRIKES_AFTER:
            return None
        broken = gradient.clone()
        broken[0, 0, 0] = math.nan
        return broken

    def attach(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(break_one)

    handle = linear_at(trainer, layer, "self_attn.o_proj").register_forward_hook(attach)
    try:
        yield
    finally:
        handle.remove()


def e4m3_gradients() -> Recipe:
    """Tensorwise with gradients in E4M3, whose range is 2^14 smaller than E5M2's."""
    base = recipes.get("tensorwise")
    gradient = replace(base.grad_input.a, format=E4M3) if base.grad_input.a else None

    def narrowed(gemm: GemmSpec) -> GemmSpec:
        return replace(gemm, a=gradient)

    return replace(
        base,
        name="tensorwise_e4m3_gradients",
        grad_input=narrowed(base.grad_input),
        grad_weight=narrowed(base.grad_weight),
    )


@contextmanager
def add_adapter(trainer: Trainer, layer: int, *, zero: bool) -> Iterator[None]:
    """Add a low-rank adapter to the query projection; its second matrix starts at zero, and the first must not."""
    attention = block_of(trainer, layer).self_attn
    query, recipe = attention.q_proj, attention.q_proj.recipe
    down = Linear(query.in_features, RANK, bias=False, recipe=recipe, manual_scale_updates=True)
    up = Linear(RANK, query.out_features, bias=False, recipe=recipe, manual_scale_updates=True)
    nn.init.zeros_(up.weight)
    if zero:
        nn.init.zeros_(down.weight)
    attention.q_adapter_down, attention.q_adapter_up = down.to(query.weight.device), up.to(query.weight.device)
    trainer.optimizer.add_param_group({"params": [down.weight, up.weight], "weight_decay": 0.0})
    handle = query.register_forward_hook(lambda _, inputs, output: output + up(down(inputs[0])))
    watcher, trainer.watcher = trainer.watcher, _watched(trainer)
    try:
        yield
    finally:
        handle.remove()
        trainer.watcher = watcher
        trainer.optimizer.param_groups.pop()
        del attention.q_adapter_down, attention.q_adapter_up


def _watched(trainer: Trainer) -> Watcher:
    return watch(trainer.model, trainer.optimizer, interval=trainer.training.statistics_interval)


@contextmanager
def _zero_adapter(trainer: Trainer, layer: int) -> Iterator[None]:
    with add_adapter(trainer, layer, zero=True):
        yield


@contextmanager
def _cancelling_gradient(trainer: Trainer, layer: int) -> Iterator[None]:
    """A part is added to one layer's gradient that high precision cancels in both of its products, and FP8 does not.

    The layer has more outputs than inputs and sees more tokens than it has inputs, so that tokens' weights u with
    x^T u = 0 and outputs' v with v W = 0 exist; u v^T adds nothing to x^T g nor to g W.
    """
    gate = linear_at(trainer, layer, "mlp.gate_proj")

    def attach(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad:
            x = inputs[0].detach().flatten(0, -2).float()
            output.register_hook(lambda gradient: gradient + _invisible(gradient, x, gate.weight, trainer.step))

    handle = gate.register_forward_hook(attach)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def _invisible(gradient: Tensor, x: Tensor, weight: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(x.shape[0], 1, generator=generator).to(x.device)
    v = torch.randn(weight.shape[0], 1, generator=generator).to(x.device)
    u -= x @ torch.linalg.lstsq(x, u).solution
    v -= weight.float() @ torch.linalg.lstsq(weight.float(), v).solution
    added = u @ v.t()
    scaled: Tensor = added * (NOISE * gradient.float().norm() / added.norm())
    return scaled.view_as(gradient).to(gradient.dtype)


VALUE_FAULTS = (
    Fault(
        name="Inf upstream",
        story="a norm's output holds one infinite element at one step",
        code="nonfinite",
        places=("model.layers.{layer}.mlp.gate_proj", "model.layers.{layer}.post_attention_layernorm"),
        inject=_infinite_activation,
        is_remediable=False,
    ),
    Fault(
        name="NaN gradient",
        story="the gradient at an attention's output holds one NaN at one step",
        code="nonfinite",
        places=("model.layers.{layer}.self_attn.o_proj",),
        inject=_broken_gradient,
        is_remediable=False,
    ),
    Fault(
        name="E4M3 gradients",
        story="gradients with a log-normal tail are cast to E4M3 under one scale",
        code="gradient-underflow",
        places=("model.layers.{layer}." + DOWN,),
        role=ROLES[GRAD_OUTPUT],
        also=frozenset({"bulk-underflow"}),
        recipes={"model.layers.{layer}." + DOWN: e4m3_gradients()},
        workload=log_normal_gradients(DOWN, sigma=4.0),
    ),
    Fault(
        name="zero adapter",
        story="both matrices of a low-rank adapter start at zero, so that neither ever moves",
        code="zero-tensor",
        places=("model.layers.{layer}.self_attn.q_adapter_*",),
        inject=_zero_adapter,
        is_remediable=False,
    ),
    Fault(
        name="gradient below noise",
        story="tokens' gradients cancel in the weight's, and what FP8 rounds off does not",
        code="gradient-below-noise",
        places=("",),
        inject=_cancelling_gradient,
    ),
)

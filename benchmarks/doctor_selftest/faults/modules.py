"""Faults in modules: aligned gates, a drifting batch norm, a converted head."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from benchmarks.doctor_selftest.faults.fault import Fault, Injection
from benchmarks.doctor_selftest.faults.values import e4m3_gradients
from benchmarks.doctor_selftest.faults.workloads import block_of
from octavo.training.loop import Trainer

__all__ = ["MODULE_FAULTS", "adding_batch_norm"]

GROWTH = 1.12  # of the aligned rows, a step
CHANNEL = 3


@contextmanager
def _aligned_rows(trainer: Trainer, layer: int) -> Iterator[None]:
    """One row of gate and up projection becomes the same direction and grows; its output is not read."""
    mlp, began = block_of(trainer, layer).mlp, trainer.step
    generator = torch.Generator().manual_seed(layer)
    direction = torch.randn(mlp.gate_proj.in_features, generator=generator).to(mlp.gate_proj.weight.device)
    direction /= direction.norm()

    @torch.no_grad()
    def align(*_: object) -> None:
        norm = GROWTH ** (trainer.step - began)
        mlp.gate_proj.weight[CHANNEL] = direction * norm
        mlp.up_proj.weight[CHANNEL] = direction * norm
        mlp.down_proj.weight[:, CHANNEL] = 0.0

    align()
    handle = trainer.optimizer.register_step_post_hook(align)
    try:
        yield
    finally:
        handle.remove()


def adding_batch_norm(*, wandering: float) -> Injection:
    """A batch norm stands behind a block's second norm, and batches differ in size.

    Args:
        wandering: standard deviation of log2 of a batch's size; 0 for batches that are alike.
    """

    @contextmanager
    def adding(trainer: Trainer, layer: int) -> Iterator[None]:
        block = block_of(trainer, layer)
        norm = nn.BatchNorm1d(trainer.config.model.hidden_size, affine=False)
        block.batch_norm = norm.to(next(block.parameters()).device)

        def normalise(module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
            generator = torch.Generator().manual_seed(trainer.step)
            size = 2 ** (wandering * torch.randn(1, generator=generator).item()) if module.training else 1.0
            normed: Tensor = norm(size * output.float().flatten(0, -2))
            return normed.view_as(output).to(output.dtype)

        handle = block.post_attention_layernorm.register_forward_hook(normalise)
        try:
            yield
        finally:
            handle.remove()
            del block.batch_norm

    return adding


@contextmanager
def _masked_position(trainer: Trainer, _layer: int) -> Iterator[None]:
    """The head reads zeros at one position of every batch, whose gradient is huge: it sets a maximum, and no more."""
    head = trainer.model.lm_head

    def mask(module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor | None:
        if not module.training:
            return None
        masked = inputs[0].clone()
        masked[0, 0] = 0.0
        return masked

    def enlarge(gradient: Tensor) -> Tensor:
        larger = gradient.clone()
        larger[0, 0, 0] = gradient.abs().amax() * 2.0**12
        return larger

    def attach(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(enlarge)

    handles = [head.register_forward_pre_hook(mask), head.register_forward_hook(attach)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


MODULE_FAULTS = (
    Fault(
        name="SwiGLU alignment",
        story="a gate's row and an up projection's become one direction and grow, and so do outliers behind them",
        code="outlier-growth",
        places=("model.layers.{layer}.mlp", "model.layers.{layer}.mlp.*"),
        also=frozenset({"bulk-underflow"}),
        inject=_aligned_rows,
    ),
    Fault(
        name="batch norm",
        story="a batch norm in front of FP8 layers sees batches of very different size",
        code="batch-norm",
        places=("model.layers.{layer}.batch_norm",),
        inject=adding_batch_norm(wandering=3.0),
        is_remediable=False,
    ),
    Fault(
        name="head in FP8",
        story="the head is converted, and the gradient of a masked position is huge",
        code="sensitive-module",
        places=("lm_head",),
        also=frozenset({"gradient-underflow", "bulk-underflow"}),
        recipes={"lm_head": e4m3_gradients()},
        workload=_masked_position,
    ),
)

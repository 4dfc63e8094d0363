"""A whole training step of a model with a billion parameters: forward, loss, backward, AdamW.

Parameters, gradients and moments are BF16. Each variant has a copy of the modules with the same tensors, so that peaks
differ only by the memory that a recipe keeps.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.hopper.bars import judged_by_memory
from benchmarks.hopper.model import random_llama
from benchmarks.hopper.session import Rotation, Session, Variant
from benchmarks.hopper.tables import gigabytes, section_of
from octavo.bench.results import Section, Verdict
from octavo.convert import convert
from octavo.models.llama import Llama
from octavo.training.evaluate import token_loss

__all__ = ["bars", "measure", "sharing_copy"]

BASE, BF16 = "bf16, compiled", "bf16"
RECIPES = ("tensorwise", "rowwise")
MEMORY = Verdict(claim="training, peak memory × bf16, compiled", bar=0.75, at_most=True)
COMPILED = "Compiled: every layer by itself, all by the same graph."
VOCABULARY = (
    "A vocabulary of {:,}: with Llama 3's 128,256 the FP32 logits and their gradients, which no recipe changes, would "
    "be most of the peak."
)
PUBLISHED = (
    "Published for Llama 3 8B on 8 H100, compiled (torchao): tensorwise with FP8 all-gather 1.25, rowwise 1.10 times "
    "BF16's tokens a second; it saves no memory."
)


class _OptimizerStep:
    """One update on the next batch."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Rotation[Tensor]) -> None:
        self.model, self.optimizer, self.batches = model, optimizer, batches

    def __call__(self) -> None:
        tokens = self.batches()
        try:
            token_loss(self.model(tokens[:, :-1]), tokens[:, 1:]).backward()
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad(set_to_none=True)


def bars(_: Session) -> list[Verdict]:
    """Bars, which are the same for all sizes."""
    return [MEMORY]


def measure(session: Session) -> Iterator[Section]:
    """Yield tokens per second and peak memory, with layers compiled one by one and eager."""
    model = random_llama(session)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    size = session.sizes.model
    timings = session.compare(_variants(session, model, optimizer))
    peaks, failures = session.look_at_each(timings.runs, partial(session.peak_above, 0))
    timings = replace(timings, failures=(*timings.failures, *failures))
    base = peaks.get(BASE, 0)
    columns = {"peak memory": {name: gigabytes(peak) for name, peak in peaks.items()}}
    columns |= {f"× {BASE}": {name: f"{peak / base:.2f}" if base else "–" for name, peak in peaks.items()}}
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    ours = [f"{recipe}, compiled" for recipe in RECIPES]
    title = f"Training step, {millions:,.0f} M parameters, {size.batch} × {size.length:,} tokens"
    yield section_of(
        title,
        timings,
        base=BASE,
        columns=columns,
        verdicts=[judged_by_memory(MEMORY, peaks, ours, BASE, timings.failures)],
        notes=[COMPILED, VOCABULARY.format(size.vocabulary), PUBLISHED],
        raw={"peak": peaks},
    )


def _variants(session: Session, model: Llama, optimizer: torch.optim.Optimizer) -> dict[str, Variant]:
    return {
        f"{recipe}, {'compiled' if compiled else 'eager'}": _step(session, model, optimizer, recipe, compiled=compiled)
        for compiled in (True, False)
        for recipe in (BF16, *RECIPES)
    }


def _step(session: Session, model: Llama, optimizer: torch.optim.Optimizer, recipe: str, *, compiled: bool) -> Variant:
    size = session.sizes.model

    def build() -> Callable[[], object]:
        variant_model = sharing_copy(model)
        if recipe != BF16:
            convert(variant_model, recipe)
        if compiled:
            for layer in variant_model.model.layers:
                layer.forward = session.compiled(layer.forward)
        batches = session.rotation(
            lambda: torch.randint(size.vocabulary, (size.batch, size.length + 1), device=session.device), 1 << 20
        )
        return _OptimizerStep(variant_model, optimizer, batches)

    return Variant(build=build, work=size.batch * size.length, unit="tokens")


def sharing_copy(model: Any) -> Any:
    """Copy of the modules with the same parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})

"""Fisher estimate of the cost of all layers and choices, from one backward pass per window.

Let layer l's output change by Δy. To second order, the divergence of the changed model's predictions from the
reference's is

    KL ≈ ½ Δyᵀ F Δy,    F = E[g gᵀ],    g = ∂(sum of losses)/∂y, labels drawn from the model's own predictions

(F is the Fisher matrix: the Hessian of that divergence). Errors at different positions are assumed uncorrelated, so
one sample of labels serves every choice:

    KL ≈ ½ Σ_t (g_t · Δy_t)²

Δy is the actual error of a choice: the layer runs again with that choice on the reference's input. The result is in
nats per predicted token; if the model is calibrated, the expected loss increases by the same amount.

The second-order formula does not hold where g · Δy is a nat or more: a few tokens with activations a thousand times
larger would dominate the sum, although the following norms remove most of their effect. Beyond one nat the term grows
linearly, d − ½ instead of ½ d², as in Huber's loss.

The cost of a table is estimated per row. In a look-up, a position's term belongs to the row of its token. In a head
that shares the table, only word v's logit changes, by Δ_tv, which costs ½ p_tv (1 − p_tv) Δ_tv² with p the reference's
probability of the word: the diagonal of the softmax's Fisher matrix, which needs no sampling.

An expert's layer that no token reaches in any window has no estimate, which is not a cost of 0: alone it is left in
BF16, with no other choice. In a group with other experts, which have one choice for all of them
(:func:`octavo.quantization.sensitivity.units.units_of`), it must not force that on the whole layer: it keeps its
choices, and the study counts it as the costliest of the same layers in the other experts. That is more than it will
probably cost, since few tokens choose it.

Cost: one forward and backward pass, and one forward pass of each layer for each choice. Input, output and gradient of
every layer are stored for one window.

Source: the diagonal of the Fisher matrix as a measure of quantization error is that of FIT (arXiv 2210.08502) and of
LLM compression by "sensitivity" (SqueezeLLM, arXiv 2306.07629, equation 3), applied there to weights, here to outputs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.convert import expert_layers
from octavo.errors import ConfigError
from octavo.language_model import logits_of
from octavo.quantization.sensitivity.units import BF16, WEIGHT_ONLY, Unit, applied

__all__ = ["Key", "estimate"]

Key = tuple[str, str]  # unit's path, choice


@dataclass(slots=True)
class RecordedCall:
    """One call of a module: input, output and the loss's gradient of the output."""

    module: nn.Module
    x: Tensor
    y: Tensor
    gradient: Tensor | None = None


def estimate(
    model: nn.Module,
    units: Sequence[Unit],
    windows: Tensor,
    *,
    seed: int = 0,
    on_window: Callable[[int], None] = lambda _: None,
) -> tuple[tuple[Unit, ...], dict[Key, float]]:
    """Estimate the cost of each unit under each of its choices, in nats per token, with everything else in BF16.

    Tables are returned with their rows ranked. An expert's layer that no token reaches has no cost but BF16's, and no
    other choice either if no unit of its group and role was reached.

    Args:
        model: in BF16 (:func:`octavo.quantization.sensitivity.bf16_reference.in_bf16`).
        units: see :func:`units_of`.
        windows: tokens [W, T].
        seed: of the sampled labels.
        on_window: called with the number of windows done.

    Raises:
        ConfigError: a unit's output has no gradient, for example in a model without an ``nn.Embedding``.
    """
    generator = torch.Generator().manual_seed(seed)
    sums = {(unit.path, choice): 0.0 for unit in units for choice in unit.choices}
    unreached = expert_layers(model) & {unit.path for unit in units}
    rows = {unit.path: torch.zeros(unit.shape[0], dtype=torch.float64) for unit in units if unit.is_table}
    for done, window in enumerate(windows, 1):
        calls = _backward(model, units, window[None], generator)
        unreached -= {path for path in unreached if calls[path]}
        for unit in units:
            if unit.is_table:
                rows[unit.path] += _row_costs(model, unit, calls[unit.path])
                continue
            for choice in unit.choices[:-1]:
                sums[unit.path, choice] += _choice_cost(model, unit, choice, calls[unit.path])
        on_window(done)
    predicted = len(windows) * (windows.shape[1] - 1)
    ranked = tuple(replace(u, row_order=rows[u.path].argsort(stable=True)) if u.is_table else u for u in units)
    reached = {(unit.group, unit.role) for unit in ranked if unit.path not in unreached}
    ranked = tuple(u if (u.group, u.role) in reached else replace(u, choices=(BF16,)) for u in ranked)
    for unit in ranked:
        if unit.is_table:
            sums |= _sums_of_rows(unit, rows[unit.path])
    known = {(u.path, choice) for u in ranked for choice in u.choices if choice == BF16 or u.path not in unreached}
    return ranked, {key: total / predicted for key, total in sums.items() if key in known}


def _sums_of_rows(unit: Unit, rows: Tensor) -> dict[Key, float]:
    """Cost of the rows stored as codes, under each of a table's choices."""
    assert unit.row_order is not None
    ascending = rows[unit.row_order].tolist()
    codes = {choice: unit.shape[0] - unit.rows_in_bf16(choice) for choice in unit.choices if choice != BF16}
    return {(unit.path, choice): math.fsum(ascending[:count]) for choice, count in codes.items()}


def _backward(
    model: nn.Module, units: Sequence[Unit], tokens: Tensor, generator: torch.Generator
) -> dict[str, list[RecordedCall]]:
    with _recording(model, units) as calls:
        logits = logits_of(model, tokens)[0, :-1]
        if not logits.isfinite().all():
            raise ConfigError("the model predicts NaN or infinity; sensitivity needs a model with finite weights")
        probabilities = logits.detach().float().softmax(-1).cpu()
        labels = torch.multinomial(probabilities, 1, generator=generator)[:, 0].to(logits.device)
        F.cross_entropy(logits.float(), labels, reduction="sum").backward()
    experts = expert_layers(model)
    for unit in units:
        is_missing = not calls[unit.path] and unit.path not in experts
        if is_missing or any(call.gradient is None for call in calls[unit.path]):
            raise ConfigError(
                f"the loss does not reach {unit.path!r}; sensitivity needs a model whose embedding is an nn.Embedding "
                "and whose layers all run"
            )
    return calls


@contextmanager
def _recording(model: nn.Module, units: Sequence[Unit]) -> Iterator[dict[str, list[RecordedCall]]]:
    """Record each unit's calls. The graph starts at the embeddings, since no parameter requires a gradient."""
    calls: dict[str, list[RecordedCall]] = {unit.path: [] for unit in units}

    def record(path: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> None:
            if not y.requires_grad:
                y.requires_grad_()
            call = RecordedCall(module, inputs[0].detach(), y.detach())
            calls[path].append(call)
            y.register_hook(lambda gradient: setattr(call, "gradient", gradient))

        return hook

    with ExitStack() as hooks:
        for unit in units:
            for path in unit.paths:
                hooks.enter_context(model.get_submodule(path).register_forward_hook(record(unit.path)))
        yield calls


def _half_square(nats: Tensor) -> Tensor:
    """½ d² up to one nat, linear beyond."""
    return F.huber_loss(nats, torch.zeros_like(nats), reduction="none", delta=1.0)


@torch.no_grad()
def _choice_cost(model: nn.Module, unit: Unit, choice: str, calls: Sequence[RecordedCall]) -> float:
    """Cost of a choice in one window, summed over positions."""
    total = 0.0
    with applied(model, unit, choice):
        for call in calls:
            assert call.gradient is not None
            change = call.module(call.x).float() - call.y.float()
            total += _half_square((change * call.gradient.float()).sum(-1)).sum().item()
    return total


@torch.no_grad()
def _row_costs(model: nn.Module, unit: Unit, calls: Sequence[RecordedCall]) -> Tensor:
    """Cost of each row of a table as codes in one window: float64 [V]."""
    costs = torch.zeros(unit.shape[0], dtype=torch.float64)
    with applied(model, unit, WEIGHT_ONLY):
        for call in calls:
            change = call.module(call.x).float() - call.y.float()
            if isinstance(call.module, nn.Embedding):
                assert call.gradient is not None
                cost = _half_square((change * call.gradient.float()).sum(-1))
                costs.index_add_(0, call.x.flatten().cpu(), cost.flatten().double().cpu())
            else:
                probabilities = call.y.float().softmax(-1)
                cost = 0.5 * probabilities * (1 - probabilities) * change.square()
                costs += cost[:, :-1].flatten(0, 1).sum(0).double().cpu()
    return costs

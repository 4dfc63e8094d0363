"""All layers and all choices at once, from one backward pass a window: which errors would the loss notice?

Let layer l's output change by Δy. To second order the divergence of the changed model's predictions from the
reference's is

    KL ≈ ½ Δyᵀ F Δy,    F = E[g gᵀ],    g = ∂(sum of losses)/∂y, labels drawn from the model's own predictions

(F is the Fisher matrix: the Hessian of that divergence). Errors of different positions are taken to be unrelated, so
that one draw of labels gives for every choice at once

    KL ≈ ½ Σ_t (g_t · Δy_t)²

Δy is the choice's true error: the layer is run again as chosen, on the input that the reference gave it. Per token
predicted, that is in nats, and where the model predicts the text as well as it believes to, the expected loss increases
by as much.

Where g · Δy is a nat or more, no second-order formula holds: what a few tokens with activations a thousand times the
others' seem to cost would drown the rest, while the norms after them hide most of it. From there on the term grows
linearly, d − ½ in place of ½ d², as Huber's loss does.

Of a table the cost is wanted row by row. Where it is looked up, a position's term belongs to the row of its token.
Where the head shares it, word v's logit alone moves by Δ_tv, which costs ½ p_tv (1 − p_tv) Δ_tv², p being the
reference's probability of the word: the diagonal of the softmax's Fisher matrix, known without a draw.

Cost: one forward and backward, and one more forward for each choice; every layer's input, output and gradient of one
window is held.

Source: the diagonal of the Fisher matrix as a measure of quantisation error is that of FIT (arXiv 2210.08502) and of
LLM compression by "sensitivity" (SqueezeLLM, arXiv 2306.07629, equation 3), there of weights; here of outputs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.errors import ConfigError
from octavo.language_model import logits_of
from octavo.quantization.sensitivity.units import BF16, WEIGHT_ONLY, Unit, applied

__all__ = ["Key", "estimate"]

Key = tuple[str, str]  # unit's path, choice


@dataclass(slots=True)
class Call:
    """One call of a module: what it read and gave, and the loss's gradient of that."""

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
    """Nats a token that each unit costs under each of its choices, everything else in BF16.

    Tables come back with their rows ranked.

    Args:
        model: in BF16 (:func:`octavo.quantization.sensitivity.surroundings.in_bf16`).
        units: see :func:`units_of`.
        windows: tokens [W, T].
        seed: of the labels that are drawn.
        on_window: called with the number of windows done.

    Raises:
        ConfigError: a unit's output takes no gradient, such as in a model without an ``nn.Embedding``.
    """
    generator = torch.Generator().manual_seed(seed)
    sums = {(unit.path, choice): 0.0 for unit in units for choice in unit.choices}
    rows = {unit.path: torch.zeros(unit.shape[0], dtype=torch.float64) for unit in units if unit.is_table}
    for done, window in enumerate(windows, 1):
        calls = _backward(model, units, window[None], generator)
        for unit in units:
            if unit.is_table:
                rows[unit.path] += _noticed_rows(model, unit, calls[unit.path])
                continue
            for choice in unit.choices[:-1]:
                sums[unit.path, choice] += _noticed(model, unit, choice, calls[unit.path])
        on_window(done)
    predicted = len(windows) * (windows.shape[1] - 1)
    ranked = tuple(replace(u, row_order=rows[u.path].argsort(stable=True)) if u.is_table else u for u in units)
    for unit in ranked:
        if unit.is_table:
            sums |= _sums_of_rows(unit, rows[unit.path])
    return ranked, {key: total / predicted for key, total in sums.items()}


def _sums_of_rows(unit: Unit, rows: Tensor) -> dict[Key, float]:
    """What the rows that become codes cost, under each of a table's choices."""
    assert unit.row_order is not None
    ascending = rows[unit.row_order].tolist()
    codes = {choice: unit.shape[0] - unit.rows_in_bf16(choice) for choice in unit.choices if choice != BF16}
    return {(unit.path, choice): math.fsum(ascending[:count]) for choice, count in codes.items()}


def _backward(
    model: nn.Module, units: Sequence[Unit], tokens: Tensor, generator: torch.Generator
) -> dict[str, list[Call]]:
    with _recording(model, units) as calls:
        logits = logits_of(model, tokens)[0, :-1]
        if not logits.isfinite().all():
            raise ConfigError("the model predicts NaN or infinity; sensitivity needs one whose weights are all finite")
        probabilities = logits.detach().float().softmax(-1).cpu()
        labels = torch.multinomial(probabilities, 1, generator=generator)[:, 0].to(logits.device)
        F.cross_entropy(logits.float(), labels, reduction="sum").backward()
    for unit in units:
        if not calls[unit.path] or any(call.gradient is None for call in calls[unit.path]):
            raise ConfigError(
                f"the loss does not reach {unit.path!r}; sensitivity needs a model whose embedding is an nn.Embedding "
                "and whose every layer runs"
            )
    return calls


@contextmanager
def _recording(model: nn.Module, units: Sequence[Unit]) -> Iterator[dict[str, list[Call]]]:
    """Every unit's calls inside the block. Embeddings begin the graph: no parameter takes a gradient."""
    calls: dict[str, list[Call]] = {unit.path: [] for unit in units}
    handles = []

    def record(path: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> None:
            if not y.requires_grad:
                y.requires_grad_()
            call = Call(module, inputs[0].detach(), y.detach())
            calls[path].append(call)
            y.register_hook(lambda gradient: setattr(call, "gradient", gradient))

        return hook

    try:
        for unit in units:
            handles += [model.get_submodule(path).register_forward_hook(record(unit.path)) for path in unit.paths]
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _half_square(nats: Tensor) -> Tensor:
    """½ d², and from one nat on linear."""
    return F.huber_loss(nats, torch.zeros_like(nats), reduction="none", delta=1.0)


@torch.no_grad()
def _noticed(model: nn.Module, unit: Unit, choice: str, calls: Sequence[Call]) -> float:
    """The sum over positions, of the unit's calls in one window."""
    total = 0.0
    with applied(model, unit, choice):
        for call in calls:
            assert call.gradient is not None
            change = call.module(call.x).float() - call.y.float()
            total += _half_square((change * call.gradient.float()).sum(-1)).sum().item()
    return total


@torch.no_grad()
def _noticed_rows(model: nn.Module, unit: Unit, calls: Sequence[Call]) -> Tensor:
    """What each row of a table costs in one window if it becomes codes: float64 [V]."""
    found = torch.zeros(unit.shape[0], dtype=torch.float64)
    with applied(model, unit, WEIGHT_ONLY):
        for call in calls:
            change = call.module(call.x).float() - call.y.float()
            if isinstance(call.module, nn.Embedding):
                assert call.gradient is not None
                noticed = _half_square((change * call.gradient.float()).sum(-1))
                found.index_add_(0, call.x.flatten().cpu(), noticed.flatten().double().cpu())
            else:
                probabilities = call.y.float().softmax(-1)
                noticed = 0.5 * probabilities * (1 - probabilities) * change.square()
                found += noticed[:, :-1].flatten(0, 1).sum(0).double().cpu()
    return found

"""What a change really costs: the changed model's predictions beside the reference's, window by window.

Two numbers of the same windows. The loss's increase is what perplexity sees; it may be negative, and one layer's is
small beside what chance does to a window, so its standard error stands beside it. The divergence KL(BF16 ‖ changed) is
never negative, and where a model knows how sure to be it is what the loss increases by in the long run.

No divergence from a BF16 computation is 0: whatever changes one rounding changes all after it, and another order of
sums would do as much. How far that goes is measured too (:func:`floor_of`): what lies below is no layer's doing.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.language_model import logits_of
from octavo.quantization.sensitivity.screen import Key
from octavo.quantization.sensitivity.surroundings import Stages
from octavo.quantization.sensitivity.units import Unit, applied, mixed

__all__ = ["Increase", "compare", "floor_of", "increase_of", "measure"]

GROUP = 8  # windows; of 512 tokens and 49,152 words, 100 MB each


@dataclass(frozen=True, slots=True, kw_only=True)
class Increase:
    """A difference to BF16, each token predicted from those before it in its window.

    Attributes:
        nats: how much the mean loss of a token increased.
        error: its standard error over windows; infinite for one window.
        divergence: KL(BF16 ‖ changed), nats a token.
        windows: how many it is a mean of.
    """

    nats: float
    error: float
    divergence: float
    windows: int

    @property
    def perplexity_increase(self) -> float:
        """As a share: 0.01 is one percent."""
        return math.expm1(min(self.nats, 700.0))


@dataclass(frozen=True, slots=True)
class Reference:
    """What the reference predicts in one window.

    Attributes:
        log_probabilities: [T − 1, V] float32.
        targets: [T − 1].
        nats: mean loss of a token.
    """

    log_probabilities: Tensor
    targets: Tensor
    nats: float

    @classmethod
    def of(cls, logits: Tensor, tokens: Tensor) -> "Reference":
        """From logits [1, T, V] of tokens [1, T]."""
        log_probabilities = logits[0, :-1].float().log_softmax(-1)
        targets = tokens[0, 1:]
        return cls(log_probabilities, targets, F.nll_loss(log_probabilities, targets).item())

    def compared(self, logits: Tensor) -> tuple[float, float]:
        """Loss increase and divergence of other logits of the same tokens."""
        changed = logits[0, :-1].float().log_softmax(-1)
        nats = F.nll_loss(changed, self.targets).item()
        divergence = F.kl_div(changed, self.log_probabilities, reduction="sum", log_target=True).item()
        return nats - self.nats, divergence / len(self.targets)


def increase_of(pairs: Sequence[tuple[float, float]]) -> Increase:
    """The mean over windows of (loss increase, divergence)."""
    nats = [pair[0] for pair in pairs]
    error = statistics.stdev(nats) / math.sqrt(len(nats)) if len(nats) > 1 else math.inf
    divergence = statistics.fmean(pair[1] for pair in pairs)
    return Increase(nats=statistics.fmean(nats), error=error, divergence=divergence, windows=len(nats))


@torch.no_grad()
def measure(
    model: nn.Module,
    units: Sequence[Unit],
    chosen: Sequence[Key],
    windows: Tensor,
    *,
    on_pair: Callable[[int], None] = lambda _: None,
) -> dict[Key, Increase]:
    """The increase by each (unit, choice) alone, everything else in BF16.

    Args:
        model: in BF16 (:func:`octavo.quantization.sensitivity.surroundings.in_bf16`).
        units: where the paths of ``chosen`` are found.
        chosen: what to measure.
        windows: tokens [W, T].
        on_pair: called with the number of forward passes done, of W · len(chosen).
    """
    by_path = {unit.path: unit for unit in units}
    found: dict[Key, list[tuple[float, float]]] = {key: [] for key in chosen}
    done = 0
    for window in windows:
        stages = Stages(model, window[None])
        reference = Reference.of(stages.logits, window[None])
        for path, choice in chosen:
            with applied(model, by_path[path], choice):
                found[path, choice].append(reference.compared(stages.again(by_path[path])))
            done += 1
            on_pair(done)
    return {key: increase_of(pairs) for key, pairs in found.items()}


@torch.no_grad()
def floor_of(model: nn.Module, units: Sequence[Unit], windows: Tensor) -> Increase:
    """What the smallest change does: the first feature of the first linear layer, one BF16 step up.

    Args:
        model: in BF16 (:func:`octavo.quantization.sensitivity.surroundings.in_bf16`).
        units: in the model's order.
        windows: tokens [W, T].
    """
    layer = model.get_submodule(next(unit.path for unit in units if not unit.is_table))
    pairs = []
    for window in windows:
        reference = Reference.of(logits_of(model, window[None]), window[None])
        handle = layer.register_forward_hook(_one_step_up)
        try:
            pairs.append(reference.compared(logits_of(model, window[None])))
        finally:
            handle.remove()
    return increase_of(pairs)


def _one_step_up(_module: nn.Module, _inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
    moved = y.clone()
    moved[..., 0] *= 1 + torch.finfo(torch.bfloat16).eps
    return moved


@torch.no_grad()
def compare(
    model: nn.Module,
    units: Sequence[Unit],
    mixes: Sequence[Mapping[str, str]],
    windows: Tensor,
    *,
    on_forward: Callable[[int], None] = lambda _: None,
) -> tuple[float, list[Increase]]:
    """The reference's loss on the windows, and the increase by each mix of choices.

    Args:
        model: in BF16 (:func:`octavo.quantization.sensitivity.surroundings.in_bf16`).
        units: all that may be chosen for.
        mixes: from unit's path to choice; BF16 where one says nothing.
        windows: tokens [W, T]; the reference's predictions of GROUP of them are held at once.
        on_forward: called with the number of forward passes done, of W · (1 + len(mixes)).
    """
    nats: list[float] = []
    pairs: list[list[tuple[float, float]]] = [[] for _ in mixes]
    for group in windows.split(GROUP):
        references = [Reference.of(logits_of(model, window[None]), window[None]) for window in group]
        nats += [reference.nats for reference in references]
        for found, mix in zip(pairs, mixes, strict=True):
            with mixed(model, units, mix):
                for window, reference in zip(group, references, strict=True):
                    found.append(reference.compared(logits_of(model, window[None])))
                    on_forward(len(nats) + sum(map(len, pairs)))
    return statistics.fmean(nats), [increase_of(found) for found in pairs]

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
from torch import Tensor, nn

from octavo.curves import perplexity_change
from octavo.language_model import logits_of
from octavo.quantization.comparison.scores import WindowScore, score_window
from octavo.quantization.sensitivity.screen import Key
from octavo.quantization.sensitivity.surroundings import Stages
from octavo.quantization.sensitivity.units import Unit, applied, mixed
from octavo.training.comparison import paired_gap

__all__ = ["Increase", "compare", "floor_of", "increase_of", "measure"]

GROUP = 8  # windows; of 512 tokens and 49,152 words, 50 MB of BF16 logits each


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
        return perplexity_change(self.nats)


def increase_of(changed: Sequence[WindowScore], known: Sequence[float]) -> Increase:
    """From a changed model's scores, and what the reference lost in the same windows."""
    gap = paired_gap([window.nats for window in changed], known)
    error = math.inf if len(known) == 1 else gap.standard_error
    divergence = statistics.fmean(window.divergence for window in changed)
    return Increase(nats=gap.nats, error=error, divergence=divergence, windows=len(known))


class _Reference:
    """What the reference predicts in one window: logits [1, T, V] of tokens [1, T]."""

    def __init__(self, logits: Tensor, tokens: Tensor) -> None:
        self.logits, self.tokens = logits, tokens
        self.nats = self.score(logits).nats

    def score(self, logits: Tensor) -> WindowScore:
        """Of a changed model's logits of the same tokens."""
        return score_window(logits[0, :-1], self.logits[0, :-1], self.tokens[0, 1:])


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
    found: dict[Key, list[WindowScore]] = {key: [] for key in chosen}
    known: list[float] = []
    done = 0
    for window in windows:
        stages = Stages(model, window[None])
        reference = _Reference(stages.logits, window[None])
        known.append(reference.nats)
        for path, choice in chosen:
            with applied(model, by_path[path], choice):
                found[path, choice].append(reference.score(stages.again(by_path[path])))
            done += 1
            on_pair(done)
    return {key: increase_of(scores, known) for key, scores in found.items()}


@torch.no_grad()
def floor_of(model: nn.Module, units: Sequence[Unit], windows: Tensor) -> Increase:
    """What the smallest change does: the first feature of the first linear layer, one BF16 step up.

    Args:
        model: in BF16 (:func:`octavo.quantization.sensitivity.surroundings.in_bf16`).
        units: in the model's order.
        windows: tokens [W, T].
    """
    layer = model.get_submodule(next(unit.path for unit in units if not unit.is_table))
    moved, known = [], []
    for window in windows:
        reference = _Reference(logits_of(model, window[None]), window[None])
        known.append(reference.nats)
        handle = layer.register_forward_hook(_one_step_up)
        try:
            moved.append(reference.score(logits_of(model, window[None])))
        finally:
            handle.remove()
    return increase_of(moved, known)


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
        windows: tokens [W, T]; the reference's logits of GROUP of them are held at once.
        on_forward: called with the number of forward passes done, of W · (1 + len(mixes)).
    """
    known: list[float] = []
    scores: list[list[WindowScore]] = [[] for _ in mixes]
    for group in windows.split(GROUP):
        references = [_Reference(logits_of(model, window[None]), window[None]) for window in group]
        known += [reference.nats for reference in references]
        for found, mix in zip(scores, mixes, strict=True):
            with mixed(model, units, mix):
                for window, reference in zip(group, references, strict=True):
                    found.append(reference.score(logits_of(model, window[None])))
                    on_forward(len(known) + sum(map(len, scores)))
    return statistics.fmean(known), [increase_of(found, known) for found in scores]

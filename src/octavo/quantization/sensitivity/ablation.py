"""Measured cost of a change: the changed model's predictions compared with the reference's, window by window.

Two quantities are measured on the same windows. The increase of the loss determines perplexity; it may be negative, and
for one layer it is small compared with the variation between windows, so it has a standard error. The divergence
KL(BF16 ‖ changed) is never negative; for a calibrated model it is the expected increase of the loss.

No change of a BF16 computation has divergence 0: one different rounding changes all later ones, as another summation
order would. This floor is measured too (:func:`floor_of`); smaller divergences cannot be attributed to a layer.
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
from octavo.quantization.sensitivity.bf16_reference import ResumableForward
from octavo.quantization.sensitivity.fisher_estimate import Key
from octavo.quantization.sensitivity.units import Unit, applied, mixed
from octavo.training.comparison import paired_gap

__all__ = ["Increase", "compare", "floor_of", "increase_of", "measure"]

GROUP = 8  # windows; of 512 tokens and 49,152 words, 50 MB of BF16 logits each


@dataclass(frozen=True, slots=True, kw_only=True)
class Increase:
    """Difference to BF16 in next-token prediction.

    Attributes:
        nats: increase of the mean loss per token.
        error: standard error of ``nats`` over windows; infinite for one window.
        divergence: KL(BF16 ‖ changed), in nats per token.
        windows: number of windows.
    """

    nats: float
    error: float
    divergence: float
    windows: int

    @property
    def perplexity_increase(self) -> float:
        """Increase of the perplexity as a fraction: 0.01 is one percent."""
        return perplexity_change(self.nats)


def increase_of(changed: Sequence[WindowScore], reference_nats: Sequence[float]) -> Increase:
    """Compute the increase from a changed model's scores and the reference's losses in the same windows."""
    gap = paired_gap([window.nats for window in changed], reference_nats)
    error = math.inf if len(reference_nats) == 1 else gap.standard_error
    divergence = statistics.fmean(window.divergence for window in changed)
    return Increase(nats=gap.nats, error=error, divergence=divergence, windows=len(reference_nats))


class _ReferenceWindow:
    """Reference logits [1, T, V] of one window of tokens [1, T]."""

    def __init__(self, logits: Tensor, tokens: Tensor) -> None:
        self.logits, self.tokens = logits, tokens
        self.nats = self.score(logits).nats

    def score(self, logits: Tensor) -> WindowScore:
        """Score a changed model's logits of the same tokens."""
        return score_window(logits[0, :-1], self.logits[0, :-1], self.tokens[0, 1:])


@torch.no_grad()
def measure(
    model: nn.Module,
    units: Sequence[Unit],
    pairs: Sequence[Key],
    windows: Tensor,
    *,
    on_pair: Callable[[int], None] = lambda _: None,
) -> dict[Key, Increase]:
    """Measure the increase caused by each (unit, choice) alone, with everything else in BF16.

    Args:
        model: in BF16 (:func:`octavo.quantization.sensitivity.bf16_reference.in_bf16`).
        units: all units of ``pairs``.
        pairs: (unit path, choice) pairs to measure.
        windows: tokens [W, T].
        on_pair: called with the number of forward passes done, of W · len(pairs).
    """
    by_path = {unit.path: unit for unit in units}
    scores_by_pair: dict[Key, list[WindowScore]] = {key: [] for key in pairs}
    reference_nats: list[float] = []
    done = 0
    for window in windows:
        forward = ResumableForward(model, window[None])
        reference = _ReferenceWindow(forward.logits, window[None])
        reference_nats.append(reference.nats)
        for path, choice in pairs:
            with applied(model, by_path[path], choice):
                scores_by_pair[path, choice].append(reference.score(forward.recompute(by_path[path])))
            done += 1
            on_pair(done)
    return {key: increase_of(scores, reference_nats) for key, scores in scores_by_pair.items()}


@torch.no_grad()
def floor_of(model: nn.Module, units: Sequence[Unit], windows: Tensor) -> Increase:
    """Measure the smallest possible change: the first output feature of the first linear layer, one BF16 step up.

    Args:
        model: in BF16 (:func:`octavo.quantization.sensitivity.bf16_reference.in_bf16`).
        units: in the model's order.
        windows: tokens [W, T].
    """
    layer = model.get_submodule(next(unit.path for unit in units if not unit.is_table))
    changed, reference_nats = [], []
    for window in windows:
        reference = _ReferenceWindow(logits_of(model, window[None]), window[None])
        reference_nats.append(reference.nats)
        with layer.register_forward_hook(_one_step_up):
            changed.append(reference.score(logits_of(model, window[None])))
    return increase_of(changed, reference_nats)


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
    """Measure the reference's loss on the windows, and the increase caused by each mix.

    Args:
        model: in BF16 (:func:`octavo.quantization.sensitivity.bf16_reference.in_bf16`).
        units: all units.
        mixes: choices by unit path; BF16 by default.
        windows: tokens [W, T]; the reference's logits of GROUP windows are in memory at once.
        on_forward: called with the number of forward passes done, of W · (1 + len(mixes)).
    """
    reference_nats: list[float] = []
    scores: list[list[WindowScore]] = [[] for _ in mixes]
    for group in windows.split(GROUP):
        references = [_ReferenceWindow(logits_of(model, window[None]), window[None]) for window in group]
        reference_nats += [reference.nats for reference in references]
        for mix_scores, mix in zip(scores, mixes, strict=True):
            with mixed(model, units, mix):
                for window, reference in zip(group, references, strict=True):
                    mix_scores.append(reference.score(logits_of(model, window[None])))
                    on_forward(len(reference_nats) + sum(map(len, scores)))
    return statistics.fmean(reference_nats), [increase_of(mix_scores, reference_nats) for mix_scores in scores]

"""Agreement of two engines on one text, layer by layer and token by token (``octavo agree``).

    windows, teacher-forced      the trainer's pass, the server's, and one of the trainer with other last bits
    a layer                      its codes and outputs on the trainer's inputs, and its outputs end to end
    tokens                       octavo.engines.token_scores

The floor is the trainer against itself, with every number of its embeddings one step of its dtype higher or lower, at
random. A number next to a tie takes the other code then, and layers amplify the step. Two engines that differ by less
end to end cannot be told apart there; a layer's outputs on the same inputs have no such floor.

Means have a 95 % interval over windows. The verdict is that of KL(server ‖ trainer), which RL code estimates by k1 and
k3: the mean, against ``max_kl``.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from octavo.engines.folder_fit import check_folder_fits
from octavo.engines.layer_differences import CodesDifference, compare_codes, relative_error, total_of
from octavo.engines.linear import input_as
from octavo.engines.model import EngineLinear, EngineModel, copies_for, is_of_expert, watching
from octavo.engines.token_scores import TokenScores, score_tokens
from octavo.errors import ConfigError
from octavo.experiments.intervals import Interval, student_interval
from octavo.language_model import LanguageModel
from octavo.numerics import Accumulate, QuantizedTensor
from octavo.numerics.cast import check_tensor
from octavo.recipes.engines.catalog import resolved
from octavo.recipes.engines.profile import EngineProfile

__all__ = [
    "MEANS",
    "Agreement",
    "LayerAgreement",
    "Progress",
    "agree",
    "check_bar",
    "check_windows",
    "mean_of",
    "nudge",
]

Progress = Callable[[str, int, int], None]  # phase, done, total
MEANS: Mapping[str, Callable[[TokenScores], Tensor]] = {  # a name in records, and each token's number
    "abs_delta": lambda scores: scores.delta.abs(),
    "forward_kl": lambda scores: scores.forward_kl,
    "reverse_kl": lambda scores: scores.reverse_kl,
    "k1": lambda scores: scores.k1,
    "k3": lambda scores: scores.k3,
    "clipped": lambda scores: scores.clipped,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAgreement:
    """A linear layer of both engines.

    Attributes:
        path: in the decoder.
        weight: codes of its weight; None if an engine does not quantize the layer.
        input: codes of the trainer's inputs; None if an engine does not cast them.
        errors: relative error of the server's output on the trainer's inputs, by window; of an expert, of windows with
            tokens for it.
        end_to_end: the same on its own inputs; empty for an expert, to which each engine may send other tokens.
    """

    path: str
    weight: CodesDifference | None
    input: CodesDifference | None
    errors: tuple[float, ...]
    end_to_end: tuple[float, ...]

    @property
    def error(self) -> Interval:
        """Mean error on the same inputs; NaN for an expert without tokens."""
        return student_interval(self.errors or (math.nan,))

    @property
    def mean_end_to_end(self) -> float | None:
        """Mean error on its own inputs; None for an expert."""
        return sum(self.end_to_end) / len(self.end_to_end) if self.end_to_end else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Result of :func:`agree`.

    Attributes:
        trainer: its profile.
        server: its profile.
        layers: in the order of the decoder.
        scores: of the server against the trainer, by window.
        floor: of the trainer with other last bits against the trainer, by window.
        length: tokens a window; the first is not predicted.
        is_equal: whether all logits have equal values.
        max_kl: the bar; None asks for no verdict.
    """

    trainer: EngineProfile
    server: EngineProfile
    layers: tuple[LayerAgreement, ...]
    scores: tuple[TokenScores, ...]
    floor: tuple[TokenScores, ...]
    length: int
    is_equal: bool
    max_kl: float | None = None

    @property
    def kl(self) -> Interval:
        """KL(server ‖ trainer), nats a token."""
        return mean_of(self.scores, "reverse_kl")

    @property
    def agrees(self) -> bool:
        """Whether the mean KL is within ``max_kl``; without one, or with 0, whether all logits are equal."""
        return self.kl.estimate <= self.max_kl if self.max_kl else self.is_equal


def mean_of(windows: Sequence[TokenScores], name: str) -> Interval:
    """Mean over windows of one of :data:`MEANS`."""
    return student_interval([float(MEANS[name](scores).mean()) for scores in windows])


@torch.no_grad()
def agree(
    model: LanguageModel | nn.Module,
    trainer: str | EngineProfile,
    server: str | EngineProfile,
    tokens: Tensor,
    *,
    max_kl: float | None = None,
    accumulate: Accumulate | None = None,
    seed: int = 0,
    on_progress: Progress = lambda _name, _done, _total: None,
) -> Agreement:
    """Compare what two engines compute of one model on one text.

    Args:
        model: octavo's Llama or a decoder of transformers, or the ``LanguageModel`` of one; not changed.
        trainer: a profile or its name.
        server: likewise.
        tokens: int64 [windows, T].
        max_kl: largest KL(server ‖ trainer) that counts as agreement, in nats a token.
        accumulate: sums of both engines' GEMMs instead of their own.
        seed: of tokens that the server draws, and of the floor.
        on_progress: called with a phase's name, and windows done of all.

    Raises:
        ConfigError: an unknown profile, tokens of another shape or beyond the vocabulary, a bar below 0, a model that a
            profile does not fit, or a folder in FP8 that the server casts otherwise.
        DataError: an engine's logits are not finite.

    Example:
        >>> from octavo.models import Llama, LlamaConfig
        >>> sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_layers": 1}
        >>> llama = Llama(LlamaConfig(**sizes, num_heads=2, num_kv_heads=1, max_positions=16))
        >>> result = agree(llama, "vllm-token", "vllm-token", torch.arange(16).reshape(2, 8))
        >>> result.kl.estimate, result.agrees
        (0.0, True)
    """
    check_windows(tokens)
    check_bar(max_kl)
    trained, served = resolved(trainer, accumulate), resolved(server, accumulate)
    copies = copies_for(model, (trained, served), tokens)
    check_folder_fits(model, served)
    ours, theirs, nudged = copies.of(trained), copies.of(served), copies.of(trained)
    nudge(nudged, seed)
    layers = _LayerComparison(ours, theirs)
    generator, floor_generator = (torch.Generator().manual_seed(seed) for _ in range(2))
    scores, floor, is_equal = [], [], True
    for index, window in enumerate(tokens):
        expected, got = layers.logits(window[None, :-1])
        is_equal = is_equal and bool((expected == got).all())
        scores.append(score_tokens(expected, got, window[1:], generator))
        floor.append(score_tokens(expected, nudged(window[None, :-1])[0], window[1:], floor_generator))
        on_progress("compare", index + 1, len(tokens))
    return Agreement(
        trainer=trained,
        server=served,
        layers=layers.result(),
        scores=tuple(scores),
        floor=tuple(floor),
        length=tokens.shape[1],
        is_equal=is_equal,
        max_kl=max_kl,
    )


def check_windows(tokens: Tensor) -> None:
    """Raise ConfigError unless tokens are [windows, T] and each window predicts one."""
    check_tensor(tokens, "tokens")
    if tokens.ndim != 2 or tokens.shape[1] < 2 or not len(tokens):
        raise ConfigError(f"tokens are [windows, T] with at least 2 a window, not {tuple(tokens.shape)}")


def check_bar(max_kl: float | None) -> None:
    """Raise ConfigError unless a bar is a number of nats of at least 0, or None."""
    if max_kl is not None and not max_kl >= 0:
        raise ConfigError(f"max_kl takes nats a token, 0 or more, not {max_kl}; None asks for no verdict")


def nudge(model: EngineModel, seed: int) -> None:
    """Move each number of an engine model's embeddings to the next or the previous of its dtype, at random.

    Zeros stay. A head that shares the weight does not change.
    """
    embedding = next(module for module in model.modules() if isinstance(module, nn.Embedding))
    weight = embedding.weight.detach()
    bits = weight.view(torch.int32 if weight.dtype is torch.float32 else torch.int16)
    coin = torch.randint(2, weight.shape, generator=torch.Generator().manual_seed(seed), dtype=bits.dtype)
    moved = (bits + (2 * coin - 1).to(bits.device)).view(weight.dtype)
    embedding.weight = nn.Parameter(torch.where(weight == 0, weight, moved), requires_grad=False)


class _LayerComparison:
    """Differences of the layers that either engine quantizes, gathered by hooks in both engines' passes."""

    def __init__(self, ours: EngineModel, theirs: EngineModel) -> None:
        self._ours, self._theirs = ours, theirs
        quantized = {*ours.layers, *theirs.layers}
        self._paths = [path for path, _ in ours.model.named_modules() if path in quantized]
        self._inputs: dict[str, list[CodesDifference]] = {path: [] for path in self._paths}
        self._errors: dict[str, list[float]] = {path: [] for path in self._paths}
        self._end_to_end: dict[str, list[float]] = {path: [] for path in self._paths}
        self._outputs: dict[str, Tensor] = {}

    def logits(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [T, V] of both engines for tokens [1, T]; what their layers compute is compared meanwhile."""
        layers = [{path: each.model.get_submodule(path) for path in self._paths} for each in (self._ours, self._theirs)]
        with watching(layers[0], self._see_trainer):
            expected: Tensor = self._ours(tokens)[0]
        whole = {path: layer for path, layer in layers[1].items() if not is_of_expert(path)}
        with watching(whole, self._see_server):
            got: Tensor = self._theirs(tokens)[0]
        return expected, got

    def _see_trainer(self, path: str, x: Tensor, y: Tensor) -> None:
        self._outputs[path] = y
        self._errors[path].append(relative_error(self._theirs.layer_output(path, x), y))
        ours, theirs = self._ours.layers.get(path), self._theirs.layers.get(path)
        if ours is not None and theirs is not None:
            a, b = _operand(ours, x), _operand(theirs, x)
            if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
                self._inputs[path].append(compare_codes(a, b))

    def _see_server(self, path: str, _: Tensor, y: Tensor) -> None:
        self._end_to_end[path].append(relative_error(y, self._outputs.pop(path)))

    def result(self) -> tuple[LayerAgreement, ...]:
        return tuple(
            LayerAgreement(
                path=path,
                weight=self._weight(path),
                input=total_of(self._inputs[path]) if self._inputs[path] else None,
                errors=tuple(self._errors[path]),
                end_to_end=tuple(self._end_to_end[path]),
            )
            for path in self._paths
        )

    def _weight(self, path: str) -> CodesDifference | None:
        ours, theirs = self._ours.layers.get(path), self._theirs.layers.get(path)
        return None if ours is None or theirs is None else compare_codes(ours.codes, theirs.codes)


def _operand(layer: EngineLinear, x: Tensor) -> QuantizedTensor | Tensor:
    return input_as(x, layer.profile, scale=layer.input_scale, amax=layer.input_amax)

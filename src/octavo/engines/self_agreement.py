"""Agreement of an engine with itself: what its answers owe to the way in which they are computed.

A window alone, in one pass on one rank, is compared with the same tokens

    in company         in a batch with three others of other lengths; rows of padding take no part in casts and GEMMs
    token by token     a pass for each position, which reads earlier keys and values through the engine's cache
    R ranks            each linear layer divided as tensor parallelism does (octavo.engines.rank_slices)

and with each cause of the last alone: outputs divided; inputs divided with the slices' own scales; with the whole
layer's scales and each rank's product rounded; and with neither, where only the order of sums is another.

Everything but casts is computed row by row (octavo.kernels.row_by_row), so a difference is the engine's casts, scales,
cache and sums of ranks, and none of torch's kernels. How an engine's own kernels order their sums is not modelled.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from octavo.engines.agreement import Progress, check_bar, check_windows, mean_of
from octavo.engines.folder_fit import check_folder_fits
from octavo.engines.model import EngineCopies, EngineModel, copies_for, is_of_expert
from octavo.engines.rank_slices import INPUTS, OUTPUTS, SlicedLinear, divided_dimension
from octavo.engines.token_scores import TokenScores, score_tokens
from octavo.errors import BackendError, ConfigError
from octavo.experiments.intervals import Interval
from octavo.kernels.row_by_row import RowByRow
from octavo.language_model import LanguageModel
from octavo.numerics import Accumulate
from octavo.numerics.cast_spec import check_integer
from octavo.recipes.engines.catalog import resolved
from octavo.recipes.engines.profile import EngineProfile

__all__ = ["SelfAgreement", "WayAgreement", "agree_with_itself"]

RANKS = (2, 4)
COMPANY = (3, 2, 1)  # lengths of the others in a batch, in quarters of the window's
IN_COMPANY, BY_TOKEN = "in company", "token by token"


@dataclass(frozen=True, slots=True, kw_only=True)
class WayAgreement:
    """One way of computing a text, against a window alone in one pass.

    Attributes:
        name: of the way.
        scores: by window, with the way in the server's place.
        is_equal: whether all logits have equal bits.
        ranks: number of them; None where the layers are whole.
        is_cause: whether only one of the things that ranks change was changed.
        weight_scales: share of divided weights' elements with another scale than undivided; None where none is divided.
        input_scales: the same of inputs that ranks divide; None where none is divided or cast.
    """

    name: str
    scores: tuple[TokenScores, ...]
    is_equal: bool
    ranks: int | None = None
    is_cause: bool = False
    weight_scales: float | None = None
    input_scales: float | None = None

    @property
    def kl(self) -> Interval:
        """KL(this way ‖ alone), nats a token."""
        return mean_of(self.scores, "reverse_kl")


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfAgreement:
    """Result of :func:`agree_with_itself`.

    Attributes:
        profile: the engine.
        ways: in the order in which they ran.
        refused: name and reason of each way that this model or engine does not allow.
        length: tokens a window; the first is not predicted.
        max_kl: the bar; None asks for no verdict.
    """

    profile: EngineProfile
    ways: tuple[WayAgreement, ...]
    refused: tuple[tuple[str, str], ...]
    length: int
    max_kl: float | None = None

    @property
    def agrees(self) -> bool:
        """Whether each way's mean KL is within ``max_kl``; without one, or with 0, whether all have equal bits."""
        return all(way.kl.estimate <= self.max_kl if self.max_kl else way.is_equal for way in self.ways)

    @property
    def causes(self) -> dict[int, WayAgreement]:
        """By number of ranks that change a bit: the single change that makes the largest KL."""
        changed = [way.ranks for way in self.ways if way.ranks and not (way.is_cause or way.is_equal)]
        causes = {ranks: [way for way in self.ways if way.ranks == ranks and way.is_cause] for ranks in changed}
        return {ranks: max(ways, key=lambda way: way.kl.estimate) for ranks, ways in causes.items() if ways}


@torch.no_grad()
def agree_with_itself(
    model: LanguageModel | nn.Module,
    profile: str | EngineProfile,
    tokens: Tensor,
    *,
    ranks: Sequence[int] = RANKS,
    max_kl: float | None = None,
    accumulate: Accumulate | None = None,
    seed: int = 0,
    on_progress: Progress = lambda _name, _done, _total: None,
) -> SelfAgreement:
    """Compare what one engine computes of a text alone, in company, token by token and on several ranks.

    Args:
        model: as for :func:`octavo.agree`.
        profile: the engine or its name.
        tokens: int64 [windows, T].
        ranks: numbers of ranks, each at least 2.
        max_kl: largest KL(a way ‖ alone) that counts as agreement, in nats a token.
        accumulate: sums of GEMMs instead of the engine's own.
        seed: of tokens that are drawn for the estimators.
        on_progress: called with a way's name, and windows done of all.

    Raises:
        ConfigError: an unknown profile, tokens of another shape or beyond the vocabulary, ranks below 2, a bar below
            0, a model that a profile does not fit, or a folder in FP8 that the engine casts otherwise.
        DataError: the engine's logits are not finite.

    Example:
        >>> from octavo.models import Llama, LlamaConfig
        >>> sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_layers": 1}
        >>> llama = Llama(LlamaConfig(**sizes, num_heads=2, num_kv_heads=1, max_positions=16))
        >>> found = agree_with_itself(llama, "vllm-token", torch.arange(16).reshape(2, 8), ranks=(2,))
        >>> [way.name for way in found.ways if way.is_equal][:3]
        ['in company', 'token by token', '2 ranks, outputs divided']
    """
    check_windows(tokens)
    check_bar(max_kl)
    for count in ranks:
        check_integer("ranks", count, least=2)
    engine = resolved(profile, accumulate)
    copies = copies_for(model, (engine,), tokens)
    check_folder_fits(model, engine)
    runs = _Runs(copies, engine, tokens, seed, on_progress)
    ways, refused = [runs.score(IN_COMPANY, runs.in_company), runs.score(BY_TOKEN, runs.by_token)], []
    for count, division in ((count, each) for count in ranks for each in divisions_of(engine.output)):
        try:
            ways.append(runs.score_divided(count, division))
        except (BackendError, ConfigError) as error:
            refused.append((division.name_on(count), str(error)))
    return SelfAgreement(
        profile=engine, ways=tuple(ways), refused=tuple(refused), length=tokens.shape[1], max_kl=max_kl
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How ranks divide a decoder: of which layers, and as for :class:`SlicedLinear`; as engines do by default."""

    cause: str = ""
    dimensions: tuple[int, ...] = (OUTPUTS, INPUTS)
    own_scales: bool = True
    sums: torch.dtype | None = None

    def name_on(self, ranks: int) -> str:
        """Name of the way with a number of ranks."""
        return f"{ranks} ranks, {self.cause}" if self.cause else f"{ranks} ranks"


def divisions_of(output: torch.dtype) -> Iterator[Division]:
    """The division that engines make, then each thing that it changes alone; products in FP32 are not rounded."""
    inputs, exact = (INPUTS,), torch.float32
    yield Division()
    yield Division(cause="outputs divided", dimensions=(OUTPUTS,))
    yield Division(cause="scales of slices", dimensions=inputs, sums=exact)
    if output != exact:
        yield Division(cause="rounded products", dimensions=inputs, own_scales=False)
    yield Division(cause="order of sums", dimensions=inputs, own_scales=False, sums=exact)


class _Runs:
    """Passes of one engine over the same windows, scored against each window alone."""

    def __init__(
        self, copies: EngineCopies, profile: EngineProfile, tokens: Tensor, seed: int, on_progress: Progress
    ) -> None:
        self._copies, self._profile, self._tokens = copies, profile, tokens
        self._seed, self._on_progress = seed, on_progress
        self._engine, self._layers = self._on_ranks(1, Division())
        self._alone = list(self._each("alone", lambda index: self._engine(tokens[index : index + 1, :-1])[0]))

    def score(self, name: str, logits: Callable[[int], Tensor]) -> WayAgreement:
        """Score a function from a window's index to its logits [T - 1, V]."""
        generator = torch.Generator().manual_seed(self._seed)
        scores, is_equal = list[TokenScores](), True
        for alone, window, found in zip(self._alone, self._tokens, self._each(name, logits), strict=True):
            scores.append(score_tokens(alone, found, window[1:], generator))
            is_equal = is_equal and torch.equal(alone, found)
        return WayAgreement(name=name, scores=tuple(scores), is_equal=is_equal)

    def in_company(self, index: int) -> Tensor:
        """Logits of a window in a batch with others."""
        window, *others = (self._tokens[(index + each) % len(self._tokens), :-1] for each in range(len(COMPANY) + 1))
        are_equal = any(map(is_of_expert, self._layers))  # a router sends padding to experts too
        lengths = [len(window) if are_equal else -(-len(window) * part // 4) for part in COMPANY]
        batch = [window, *(other[:length] for other, length in zip(others, lengths, strict=True))]
        with _without_padding(self._layers.values(), torch.tensor([len(text) for text in batch])):
            logits: Tensor = self._engine(nn.utils.rnn.pad_sequence(batch, batch_first=True))
        return logits[0]

    def by_token(self, index: int) -> Tensor:
        """Logits of a window, a pass for each token."""
        logits: Tensor = self._engine.stepwise(self._tokens[index : index + 1, :-1])
        return logits[0]

    def score_divided(self, ranks: int, division: Division) -> WayAgreement:
        """Score ranks that share the layers."""
        engine, layers = self._on_ranks(ranks, division)
        way = self.score(division.name_on(ranks), lambda index: engine(self._tokens[index : index + 1, :-1])[0])
        divided = [layer for layer in layers.values() if layer.ranks > 1]
        return replace(
            way,
            ranks=ranks,
            is_cause=bool(division.cause),
            weight_scales=_mean([layer.weight_scales for layer in divided]),
            input_scales=_mean([share for layer in divided for share in layer.input_scales]),
        )

    def _on_ranks(self, ranks: int, division: Division) -> tuple[EngineModel, dict[str, SlicedLinear]]:
        """The engine, and its quantized layers by path; a single rank has all of each."""
        engine, weights = self._copies.of(self._profile), self._copies.weights_of(self._profile)
        layers = {}
        for path, layer in engine.layers.items():
            dimension = OUTPUTS if ranks == 1 else divided_dimension(path)
            is_divided = ranks > 1 and dimension in division.dimensions
            layers[path] = SlicedLinear(
                layer,
                weights[path],
                dimension=dimension if is_divided else OUTPUTS,
                ranks=ranks if is_divided else 1,
                own_scales=is_divided and division.own_scales,
                sums=division.sums if is_divided else None,
            )
            engine.model.set_submodule(path, layers[path])
        return engine, layers

    def _each(self, name: str, logits: Callable[[int], Tensor]) -> Iterator[Tensor]:
        for index in range(len(self._tokens)):
            with RowByRow():
                found = logits(index)
            self._on_progress(name, index + 1, len(self._tokens))
            yield found


def _mean(shares: Sequence[float]) -> float | None:
    return sum(shares) / len(shares) if shares else None


@contextmanager
def _without_padding(layers: Iterable[nn.Module], lengths: Tensor) -> Iterator[None]:
    """Let quantized layers see a padded batch [B, T] as rows of its texts, one after another, as servers hold them."""
    real = (torch.arange(int(lengths.max())) < lengths[:, None]).flatten()

    def take(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0].flatten(0, -2)[real.to(inputs[0].device)],)

    def place(_: nn.Module, __: tuple[Tensor, ...], y: Tensor) -> Tensor:
        padded = y.new_zeros(len(real), y.shape[-1])
        padded[real.to(y.device)] = y
        return padded.view(len(lengths), -1, y.shape[-1])

    with ExitStack() as hooks:
        for layer in layers if not real.all() else ():
            hooks.enter_context(layer.register_forward_pre_hook(take))
            hooks.enter_context(layer.register_forward_hook(place))
        yield

"""Text generation: the sampling loop, and the interface of models for it.

A model with a cache (:class:`octavo.inference.ModelRunner`) reads every token once. :class:`FullPass` passes the whole
text through the model for every token: for models without a cache, and for recipes whose scales depend on all tokens of
a call.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from octavo.errors import ConfigError
from octavo.nn.arguments import check_whole

__all__ = ["FullPass", "TextModel", "check_sampling", "generate", "probabilities", "sample"]

NextLogits = Callable[[list[int]], Tensor]  # all token ids so far → logits [V] of the next token, on the CPU


class TextModel(Protocol):
    """Interface of models for :func:`generate`."""

    @property
    def max_length(self) -> int | None:
        """Most tokens of a text; None if unlimited, in which case the model may drop the oldest."""

    def reader(self, length: int) -> NextLogits:
        """Start a text of at most ``length`` tokens.

        Returns:
            A function from all token ids so far to the logits of the next.
        """


class FullPass:
    """Text model without a cache: every token takes a pass over the whole text.

    Args:
        model: tokens [1, T] to logits [1, T, V]; a module runs in evaluation mode, on the device of its parameters.
        context: number of newest tokens that are read; None reads all.
        within: context manager around every pass, entered again each time.

    Raises:
        ConfigError: a ``context`` below 1.
    """

    max_length = None

    def __init__(
        self,
        model: Callable[[Tensor], Tensor],
        *,
        context: int | None = None,
        within: AbstractContextManager[object] | None = None,
    ) -> None:
        check_whole("context", context, least=1)
        self._model, self._context = model, context
        self._within = nullcontext() if within is None else within
        self._device = next(model.parameters()).device if isinstance(model, nn.Module) else torch.device("cpu")

    def reader(self, length: int) -> NextLogits:
        """See :class:`TextModel`."""
        return self._next_logits

    @torch.no_grad()
    def _next_logits(self, ids: list[int]) -> Tensor:
        tokens = torch.tensor([ids if self._context is None else ids[-self._context :]], device=self._device)
        with self._within, _evaluation_mode(self._model):
            return self._model(tokens)[0, -1].float().cpu()


@contextmanager
def _evaluation_mode(model: object) -> Iterator[None]:
    if not isinstance(model, nn.Module) or not model.training:
        yield
        return
    model.eval()
    try:
        yield
    finally:
        model.train()


def generate(
    model: nn.Module | TextModel,
    prompt_ids: list[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    context: int | None = None,
    stop_id: int | None = None,
) -> Iterator[int]:
    """Yield the tokens that follow ``prompt_ids``, one at a time.

    Args:
        model: a :class:`octavo.inference.ModelRunner`, a :class:`FullPass`, or a module to wrap in a ``FullPass``.
        prompt_ids: at least one token.
        max_new_tokens: most tokens to generate; fewer if the model runs out of positions.
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: sample only among the k likeliest and those tied with the last of them; None for all.
        generator: random number generator on the CPU; None for torch's global one.
        context: number of newest tokens that a module reads; None reads all. Only for modules.
        stop_id: token to stop before; None never stops early.

    Raises:
        TypeError: a prompt that is not a list.
        ConfigError: an empty prompt or one longer than the model's positions; a negative temperature; top_k, context or
            max_new_tokens out of range; a context for a model that is not a module; while iterating, a token outside
            the vocabulary, or logits that are not finite.

    Example:
        >>> cycle = nn.Embedding.from_pretrained(torch.tensor([[0.0, 9.0], [9.0, 0.0]]))  # after 0 comes 1, after 1, 0
        >>> list(generate(cycle, [0], max_new_tokens=3, temperature=0))
        [1, 0, 1]
    """
    _check_request(prompt_ids, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k)
    if isinstance(model, nn.Module):
        model = FullPass(model, context=context)
    elif context is not None:
        raise ConfigError(
            "context only applies to a module without a cache; a ModelRunner reads all tokens, so leave context out"
        )
    count = max_new_tokens
    if (longest := model.max_length) is not None:
        if len(prompt_ids) > longest:
            raise ConfigError(
                f"the prompt has {len(prompt_ids)} tokens, but this model has {longest} positions; shorten the prompt"
            )
        count = min(count, longest - len(prompt_ids) + 1)  # the last position still predicts a token
    choose = partial(sample, temperature=temperature, top_k=top_k, generator=generator)
    next_logits = model.reader(len(prompt_ids) + max(count - 1, 0))
    return _new_tokens(next_logits, list(prompt_ids), count, choose, stop_id)


def _new_tokens(
    next_logits: NextLogits, ids: list[int], count: int, choose: Callable[[Tensor], int], stop_id: int | None
) -> Iterator[int]:
    for _ in range(count):
        token = choose(next_logits(ids))
        if token == stop_id:
            return
        ids.append(token)
        yield token


def sample(
    logits: Tensor,
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    generator: torch.Generator | None = None,
) -> int:
    """Sample one token id from logits [V].

    Args:
        logits: logits of all tokens.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: sample only among the k likeliest and those tied with the last of them; None for all.
        top_p: then only among the fewest likeliest with this total probability; 1 for all.
        min_p: then only among tokens with at least this fraction of the likeliest's probability.
        generator: random number generator on the CPU; None for torch's global one.

    Raises:
        ConfigError: the largest logit is NaN or infinite.

    Example:
        >>> sample(torch.tensor([1.0, 3.0, 2.0]), temperature=1.0, top_p=0.5)
        1
    """
    likeliest = int(logits.argmax())  # argmax returns a NaN if there is one
    if not math.isfinite(logits[likeliest]):
        raise ConfigError(
            f"the model's largest logit is {float(logits[likeliest])}, so no token can be sampled; check for NaN or "
            "infinite numbers in its weights"
        )
    if temperature == 0:
        return likeliest
    probs = probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    cumulative = probs.cumsum_(0)
    total, uniform = float(cumulative[-1]), float(torch.rand((), dtype=torch.float64, generator=generator))
    # One random number: torch.multinomial draws one for every token of the vocabulary, which takes a millisecond.
    return int(torch.searchsorted(cumulative, min(uniform * total, math.nextafter(total, 0)), right=True))


def probabilities(
    logits: Tensor, *, temperature: float, top_k: int | None = None, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Unnormalized probabilities of :func:`sample`, float64 [V]; ``temperature`` must be above 0.

    Example:
        >>> probabilities(torch.tensor([0.0, 0.0, -9.0, 0.0]), temperature=1.0, top_k=3, top_p=0.5).count_nonzero()
        tensor(2)
    """
    if top_k is not None and top_k < logits.numel():
        lowest_kept = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < lowest_kept, -torch.inf)
    below_most = (logits - logits.max()).double()  # FP64 keeps a tiny temperature from rounding to 0
    probs = torch.softmax(below_most.div_(temperature), dim=-1)
    if top_p < 1:
        probs = _nucleus(probs, top_p)
    return probs.masked_fill(probs < min_p * probs.max(), 0) if min_p > 0 else probs


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Set all but the fewest likeliest tokens that reach ``top_p`` together to 0; ties keep the lowest ids."""
    # Tokens below this bound sum to less than 1 - top_p, so none is needed; excluding them makes the sort fast.
    ids = (probabilities >= (1 - top_p) / 2 / len(probabilities)).nonzero()[:, 0]
    values, order = probabilities[ids].sort(descending=True, stable=True)
    needed = values.cumsum(0) - values < top_p
    needed[0] = True
    return torch.zeros_like(probabilities).scatter(0, ids[order[needed]], values[needed])


def check_sampling(*, temperature: float, top_k: int | None, top_p: float = 1.0, min_p: float = 0.0) -> None:
    """Raise ConfigError for sampling options out of range."""
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"temperature must be 0 or more, not {temperature}")
    check_whole("top_k", top_k, least=1)
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p must be above 0 and at most 1, not {top_p}")
    if not 0 <= min_p <= 1:
        raise ConfigError(f"min_p must be from 0 to 1, not {min_p}")


def _check_request(prompt_ids: list[int], *, max_new_tokens: int, temperature: float, top_k: int | None) -> None:
    """Raise TypeError for a prompt that is not a list, ConfigError for an empty one or options out of range."""
    if not isinstance(prompt_ids, (list, tuple)):
        raise TypeError(f"prompt_ids must be a list of token ids, not {type(prompt_ids).__name__}")
    if not prompt_ids:
        raise ConfigError("the prompt is empty; give at least one token")
    check_sampling(temperature=temperature, top_k=top_k)
    check_whole("max_new_tokens", max_new_tokens, least=0)

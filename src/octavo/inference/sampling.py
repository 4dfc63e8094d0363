"""Sampling parameters and the sampler of one request.

Every request has its own random generator and none uses torch's global one, so the answer for a seed does not depend on
other requests.
"""

import math
import secrets
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.models.generation import check_sampling, sample
from octavo.nn.arguments import check_whole

__all__ = ["SampledToken", "Sampler", "SamplingParams", "score_token"]

MOST_SEED = 2**63 - 1
MOST_LOGPROBS = 20  # limit of the OpenAI API


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request.

    Attributes:
        max_tokens: largest number of tokens in the answer.
        temperature: divides the logits; 0 always selects the likeliest token.
        top_k: sample only from the k likeliest tokens and those as likely as the last of them; None for all.
        top_p: then only from the smallest set with at least this total probability; 1 for all.
        min_p: then only from tokens with at least this fraction of the highest probability; 0 for all.
        seed: seed of the sampling, 0 to 2^63 - 1; None draws one.
        stop: texts that end the answer, which excludes them.
        stop_ids: tokens that end the answer, besides the model's end tokens.
        ignore_end: continue after the model's end tokens.
        logprobs: number of likeliest tokens to return with each token, 0 to 20; None returns no log probabilities.
        prompt_logprobs: also return them for the prompt's tokens from the second on; disables prefix reuse.
        deadline_s: seconds after submission at which the answer ends; None for no deadline.

    Raises:
        ConfigError: a number out of range, an empty stop text, or prompt_logprobs without logprobs.

    Example:
        >>> SamplingParams(max_tokens=5, temperature=0.7, top_p=0.9, seed=1).top_k is None
        True
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_end: bool = False
    logprobs: int | None = None
    prompt_logprobs: bool = False
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        check_sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)
        for name, least, most in (
            ("max_tokens", 1, None),
            ("seed", 0, MOST_SEED),
            ("logprobs", 0, MOST_LOGPROBS),
        ):
            value = getattr(self, name)
            check_whole(name, value, least=least)
            if most is not None and value is not None and value > most:
                raise ConfigError(f"{name} may be at most {most}, not {value}")
        if not all(self.stop):
            raise ConfigError(f"stop texts must not be empty: {self.stop!r}")
        if self.prompt_logprobs and self.logprobs is None:
            raise ConfigError("prompt_logprobs needs logprobs, the number of likeliest tokens; give logprobs")
        if self.deadline_s is not None and not 0 < self.deadline_s < math.inf:
            raise ConfigError(f"deadline_s must be a positive number of seconds, not {self.deadline_s}")


@dataclass(frozen=True, slots=True)
class SampledToken:
    """Token with its log probability in the model, before the temperature is applied.

    Attributes:
        token: token id.
        logprob: natural logarithm of its probability; None if not requested.
        top: ids and log probabilities of the likeliest tokens, likeliest first.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Sampler of one request's tokens.

    Example:
        >>> logits = torch.tensor([0.0, 3.0, 1.0])
        >>> Sampler(SamplingParams(temperature=0, logprobs=1)).choose(logits).top[0][0]
        1
    """

    def __init__(self, params: SamplingParams) -> None:
        seed = secrets.randbelow(MOST_SEED + 1) if params.seed is None else params.seed
        self._params, self._generator = params, torch.Generator("cpu").manual_seed(seed)

    def choose(self, logits: Tensor) -> SampledToken:
        """Sample a token from logits, float32 [V].

        Raises:
            ConfigError: the largest logit is NaN or infinite.
        """
        p = self._params
        token = sample(
            logits, temperature=p.temperature, top_k=p.top_k, top_p=p.top_p, min_p=p.min_p, generator=self._generator
        )
        return SampledToken(token) if p.logprobs is None else score_token(logits, token, top=p.logprobs)


def score_token(logits: Tensor, token: int, *, top: int) -> SampledToken:
    """Compute the log probabilities of a token and of the ``top`` likeliest from logits [V].

    Example:
        >>> score_token(torch.zeros(4), 2, top=0).logprob == -math.log(4)
        True
    """
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    values, ids = logprobs.topk(min(top, len(logits)))
    return SampledToken(token, float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))

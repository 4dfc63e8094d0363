"""How a request chooses its tokens: the settings, and one chooser a request with a generator of its own.

Nothing is drawn from torch's global generator and nothing is shared: what a request says for a seed does not depend on
who else is served.
"""

import math
import secrets
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.models.generation import check_sampling, sample
from octavo.nn.arguments import check_whole

__all__ = ["Chooser", "Chosen", "SamplingParams", "scored"]

MOST_SEED = 2**63 - 1
MOST_LOGPROBS = 20  # of the likeliest tokens, as the OpenAI API allows


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What a request asks for.

    Attributes:
        max_tokens: how many tokens at most.
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: sample among the k likeliest only, and those as likely as the last of them; None for all.
        top_p: then among the fewest that have this probability together; 1 for all.
        min_p: then among those at least so probable as this times the likeliest; 0 for all.
        seed: of the sampling, 0 to 2^63 - 1; None draws one.
        stop: texts before which the answer ends.
        stop_ids: tokens before which it ends, besides the model's own.
        ignore_end: go on after the model's own last token.
        logprobs: so many of the likeliest tokens are told with each token, 0 to 20; None tells no probabilities.
        prompt_logprobs: tell the same of the prompt's own tokens, from the second on; all of them are read for that.
        deadline_s: seconds from submission on after which the answer ends; None for never.

    Raises:
        ConfigError: a number out of range, an empty stop text, or a prompt's probabilities without the answer's.

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
                raise ConfigError(f"{name} may be {most} at most, not {value}")
        if not all(self.stop):
            raise ConfigError(f"stop texts have at least one character each, not {self.stop!r}")
        if self.prompt_logprobs and self.logprobs is None:
            raise ConfigError("prompt_logprobs tells as many of the likeliest tokens as logprobs says; give logprobs")
        if self.deadline_s is not None and not 0 < self.deadline_s < math.inf:
            raise ConfigError(f"deadline_s is a positive number of seconds, not {self.deadline_s}")


@dataclass(frozen=True, slots=True)
class Chosen:
    """A token and how probable the model finds it, whatever the temperature.

    Attributes:
        token: its id.
        logprob: natural logarithm of its probability; None if not asked for.
        top: ids and logarithms of the likeliest tokens, the likeliest first.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Chooser:
    """Chooses the tokens of one request.

    Example:
        >>> logits = torch.tensor([0.0, 3.0, 1.0])
        >>> Chooser(SamplingParams(temperature=0, logprobs=1)).choose(logits).top[0][0]
        1
    """

    def __init__(self, params: SamplingParams) -> None:
        seed = secrets.randbelow(MOST_SEED + 1) if params.seed is None else params.seed
        self._params, self._generator = params, torch.Generator("cpu").manual_seed(seed)

    def choose(self, logits: Tensor) -> Chosen:
        """A token from logits, float32 [V].

        Raises:
            ConfigError: logits among which none is the largest, or it is infinite.
        """
        p = self._params
        token = sample(
            logits, temperature=p.temperature, top_k=p.top_k, top_p=p.top_p, min_p=p.min_p, generator=self._generator
        )
        return Chosen(token) if p.logprobs is None else scored(logits, token, top=p.logprobs)


def scored(logits: Tensor, token: int, *, top: int) -> Chosen:
    """A token with the model's probability of it, and of the ``top`` likeliest, from logits [V].

    Example:
        >>> scored(torch.zeros(4), 2, top=0).logprob == -math.log(4)
        True
    """
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    values, ids = logprobs.topk(min(top, len(logits)))
    return Chosen(token, float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
